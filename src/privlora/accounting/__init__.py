"""Privacy accounting: what happened (events, ledger) and what it costs (accountants, calibration, budget).

Nothing here imports torch, and dp_accounting only once an epsilon is computed.
"""

from privlora.accounting.accountants import (
    Accountant,
    Adjacency,
    accountant_versions,
    delta_of,
    epsilon,
)
from privlora.accounting.budget import BudgetStatement, RunBudget, compose_ledgers
from privlora.accounting.calibration import Calibration, calibrate_noise_multiplier
from privlora.accounting.events import (
    CyclicPoissonSampling,
    PoissonSampling,
    Sampling,
    StepEvent,
    TruncatedPoissonSampling,
)
from privlora.accounting.ledger import Ledger, locked_charges
from privlora.accounting.ledger_format import LedgerSummary, Plan, read_ledger

__all__ = [
    "Accountant",
    "Adjacency",
    "BudgetStatement",
    "Calibration",
    "CyclicPoissonSampling",
    "Ledger",
    "LedgerSummary",
    "Plan",
    "PoissonSampling",
    "RunBudget",
    "Sampling",
    "StepEvent",
    "TruncatedPoissonSampling",
    "accountant_versions",
    "calibrate_noise_multiplier",
    "compose_ledgers",
    "delta_of",
    "epsilon",
    "locked_charges",
    "read_ledger",
]
