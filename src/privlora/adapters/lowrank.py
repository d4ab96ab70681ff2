"""Low-rank terms beside frozen linear layers, and the per-example gradients of those terms.

A site is one linear layer of the model, y = x W0^T. While the adapter is attached, a forward hook adds

    y += ((x @ right) * mid) @ left^T        x: (rows, T, n)   left: (m, r)   mid: (r,)   right: (n, r)

so that W = W0 + left diag(mid) right^T. In the backward pass, with E = dloss/dy (rows, T, m), the hook keeps

    P_i = E_i^T (x_i @ right) = G_i right    (rows, m, r)
    Q_i = x_i^T (E_i @ left)  = G_i^T left   (rows, n, r)        G_i = E_i^T x_i = dloss_i/dW, never formed.

x @ right is needed by the forward pass and E @ left by the backward pass anyway, so per-example gradients
cost what LoRA's own factor gradients cost. The user's modules are not wrapped: ``detach`` removes the hooks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from privlora.adapters.captured import Captured
from privlora.adapters.quantised import (
    FULL,
    activation_dtype,
    bits,
    dense_weight,
    hold,
    let_go,
    mixes_rows,
    precisions,
    refuse_unknown_storage,
)
from privlora.adapters.targets import feature_sizes, find_targets, is_conv1d, settled_targets
from privlora.errors import ModelError, PrivacyError, rank_too_large
from privlora.names import ALL_LINEAR

# Bytes of gradients that are formed at a time.
_CHUNK = 64 * 2**20

# Times the precision and (sum_t ||e_t|| ||x_t||)^2: more than what sums lose, so that no norm comes out too small.
_ROUNDING = 32


@torch.no_grad()
def dense_norms(e: Tensor, x: Tensor) -> Tensor:
    """At least ||G_i||_F for each row i, (rows,) float64, with G_i = E_i^T X_i, which is never kept (ghost clipping):

        ||sum_t e_t x_t^T||_F^2 = sum_{t, u} <e_t, e_u> <x_t, x_u>

    from T x T Gram matrices where those are smaller, else from the gradients of a few rows at a time (Li et al. 2022;
    Bu et al. 2022).

    e: (rows, T, m), x: (rows, T, n), any floating dtype; sums are in float32 or better. The excess is below 0.2 % at
    T = 512 even where no two tokens have parallel gradients. Rows that are not finite give NaN or infinity.
    """
    e, x = (t if t.dtype == torch.float64 else t.float() for t in (e, x))
    tokens, m, n = e.shape[1], e.shape[2], x.shape[2]
    if tokens * (m + n) <= m * n:
        squares = ((e @ e.mT) * (x @ x.mT)).sum(dim=(-2, -1)).double()
    else:
        rows = max(1, _CHUNK // (m * n * e.element_size()))
        squares = torch.cat(
            [
                torch.bmm(a.mT, b).square().sum(dim=(-2, -1)).double()
                for a, b in zip(e.split(rows), x.split(rows), strict=True)
            ]
        )
    largest = (e.norm(dim=-1).double() * x.norm(dim=-1).double()).sum(dim=-1)
    lost = _ROUNDING * torch.finfo(e.dtype).eps * largest.square()
    return (squares.clamp_min(0) + lost).sqrt()


@dataclass(eq=False)
class Site:
    """One adapted linear layer and the operands of its low-rank term, in the dtype of what the layer gives."""

    name: str
    module: torch.nn.Module
    m: int  # out_features
    n: int  # in_features
    left: Tensor | None = None  # (m, r)
    mid: Tensor | None = None  # (r,)
    right: Tensor | None = None  # (n, r)
    offset: tuple[Tensor, Tensor] | None = None  # fixed A0 (m, k), B0 (n, k): the layer is W0 - A0 B0^T
    reached: bool = False  # whether the current micro-batch has brought a gradient
    norms: Tensor | None = None  # (rows,) float64: ||G_i||_F, kept where the adapter wants them
    update: Tensor | None = None  # (m, n): while attached, the layer computes with W0 + update
    frozen: torch.nn.Parameter | None = None  # W0, while another weight stands in its place
    dtype: torch.dtype | None = (
        None  # of operands beside a packed weight, which does not say what its layer gives
    )

    @property
    def weight(self) -> Tensor:
        """The frozen W0, as the layer stores it (a Conv1D's is transposed, a quantised one is packed)."""
        weight: Any = self.module.weight
        return weight if self.frozen is None else self.frozen

    def recast(self, dtype: torch.dtype) -> None:
        """Keep operands in ``dtype`` from now on."""
        self.dtype = dtype
        if self.left is not None and self.mid is not None and self.right is not None:
            self.left, self.mid, self.right = (t.to(dtype) for t in (self.left, self.mid, self.right))


@dataclass(frozen=True)
class Group:
    """Sites of equal shape: their states are stacked over a leading dimension L = len(sites)."""

    m: int
    n: int
    sites: tuple[Site, ...]


Operands = tuple[Tensor, Tensor, Tensor]
"""left (m, r), mid (r,), right (n, r) of a site; or each row's own, (rows, m, r), (rows, 1, r), (rows, n, r)."""


class _LowRankTerm(torch.autograd.Function):
    """y + ((x right) * mid) left^T, keeping P and Q of the site on the way back."""

    @staticmethod
    def forward(
        ctx: Any, y: Tensor, x: Tensor, anchor: Tensor, owner: LowRankAdapter, site: Site, operands: Operands
    ) -> Tensor:
        left, mid, right = operands
        xr = x @ right  # (rows, T, r)
        ctx.save_for_backward(x, xr)
        ctx.owner, ctx.site, ctx.operands = owner, site, operands
        if y._is_view() or not y.is_contiguous():
            y = y.clone(memory_format=torch.contiguous_format)  # autograd is slow at changing views in place
        else:
            ctx.mark_dirty(y)
        if left.dim() == 3:
            return y.baddbmm_(xr * mid, left.mT)
        y.view(-1, site.m).addmm_((xr * mid).reshape(-1, xr.shape[-1]), left.T)
        return y

    @staticmethod
    def backward(ctx: Any, e: Tensor) -> tuple[Tensor | None, ...]:
        x, xr = ctx.saved_tensors
        left, mid, right = ctx.operands
        el = e @ left  # (rows, T, r)
        ctx.owner._keep(ctx.site, x, xr, e, el)
        dx = (el * mid) @ right.mT if ctx.needs_input_grad[1] else None
        return e, dx, None, None, None, None


class Compared(Protocol):
    """A state beside which two others are, to both sides of it."""

    perturbation: float

    def aside(self, steps: float) -> AbstractContextManager[None]:
        """Inside, the model is so many times ``perturbation`` away from the state."""


@dataclass
class LowRankAdapter:
    """Low-rank terms of rank ``rank`` on the chosen linear layers of ``model``.

    While attached, every parameter of the model is frozen, and only the terms' P and Q are gathered.
    ``detach`` removes the hooks and restores every ``requires_grad`` flag, so the module is exactly as before.

    Raises ModelError for unknown targets or a rank above a layer's smaller side.
    """

    model: torch.nn.Module
    rank: int = 16
    target_modules: str | Sequence[str] = ALL_LINEAR
    exclude_modules: Sequence[str] = ()
    layers_to_transform: Sequence[int] | None = None
    dropout: float = 0.0
    sites: list[Site] = field(init=False)
    groups: list[Group] = field(init=False)
    dense_norms: bool = field(default=False, init=False)
    """Whether to keep the norms of whole gradients too; they cost about as much as the low-rank ones."""
    columns: tuple[slice, slice] = field(default=(slice(None), slice(None)), init=False)
    """Which columns of P and of Q are kept, where coordinates need some of them alone."""
    in_order: bool = field(default=False, init=False)
    """Whether P and Q lie in memory row by row, not transposed: for coordinates that take them as long rows."""
    pooled: frozenset[str] = field(default=frozenset(), init=False)
    """Names of sites that may be given one state a row, (rows, features): of classifiers, behind the pooled text."""
    compared: Compared | None = field(default=None, init=False)
    """What losses are compared at in the place of gradients, where coordinates take none."""
    left_out: Mapping[str, str] = field(default_factory=dict, init=False)
    """Layer -> why a word in target_modules leaves it out."""
    one_by_one: bool = field(default=False, init=False)
    """Whether each unit goes through the model by itself, so that no bit of its gradient depends on the others; always
    where layers of 8 bits look at all rows at once (`quantised.mixes_rows`)."""

    def __post_init__(self) -> None:
        self.target_modules = settled_targets(self.model, self.target_modules)
        names = find_targets(
            self.model,
            self.target_modules,
            exclude_modules=self.exclude_modules,
            layers_to_transform=self.layers_to_transform,
        )
        self.sites = []
        self.one_by_one = mixes_rows(self.model)
        usual = activation_dtype(self.model)
        for name in names:
            module: Any = self.model.get_submodule(name)
            refuse_unknown_storage(name, module)
            m, n = feature_sizes(module) or (0, 0)
            if self.rank > min(m, n):
                raise rank_too_large(self.rank, name, (m, n), min(m, n))
            self.sites.append(Site(name, module, m, n, dtype=usual if bits(module) else None))
        self.groups = _group(self.sites)
        self.sites = [site for group in self.groups for site in group.sites]
        self._handles: list[Any] = []
        self._held: list[torch.nn.Module] = []
        self._requires_grad: list[tuple[torch.nn.Parameter, bool]] = []
        # Gives the first adapted layer a graph although nothing of the base model requires a gradient.
        self._anchor = torch.zeros((), requires_grad=True)
        self._rows: int | None = None
        self._off = self._passing = False
        self._summed = False
        self._places = {
            site.name: (g, k) for g, group in enumerate(self.groups) for k, site in enumerate(group.sites)
        }
        # Of each group that the current micro-batch has reached: P (L, rows, r, m) and Q (L, rows, r, n).
        self._stacks: dict[int, tuple[Tensor, Tensor]] = {}

    @property
    def sizes(self) -> list[int]:
        """Sites of each group."""
        return [len(group.sites) for group in self.groups]

    @property
    def parts(self) -> tuple[LowRankAdapter, ...]:
        """Those of one rank each that it consists of."""
        return (self,)

    @property
    def attached(self) -> bool:
        return bool(self._handles)

    @property
    def gathering(self) -> bool:
        """Whether the present micro-batch has brought a gradient."""
        return bool(self._stacks)

    @property
    def device(self) -> torch.device:
        """Where gradients are gathered and a method's state lies: with the first site, wherever the others are."""
        return next(self.sites[0].module.parameters()).device

    @property
    def reduced_precision(self) -> bool:
        """Whether anything in the model computes below float32, so that gradients are rounded to less as well."""
        return any(dtype not in FULL for dtype in precisions(self.model))

    def attach(self) -> LowRankAdapter:
        """Freeze the model and add the terms. Attaching twice is an error."""
        if self.attached:
            raise ModelError("the adapter is attached already", fix="call detach() first")
        for site in self.sites:
            if self.model.get_submodule(site.name) is not site.module:
                raise ModelError(
                    f"module {site.name!r} was replaced after the adapter was built",
                    why="its gradients would be those of a stale layer",
                    fix="build the model, move it to its device, then build the adapter",
                )
        self._held = hold(self.model)
        self._requires_grad = [(p, p.requires_grad) for p in self.model.parameters()]
        for p, _ in self._requires_grad:
            p.requires_grad_(False)
        self._anchor = torch.zeros((), device=self.device, requires_grad=True)
        for site in self.sites:
            self._handles.append(site.module.register_forward_hook(self._hook(site)))
            _show_update(site)
        # Re-entrant checkpointing runs a block's backward only if the block's input requires a gradient.
        model: Any = self.model
        embeddings = model.get_input_embeddings() if hasattr(model, "get_input_embeddings") else None
        if embeddings is not None:
            self._handles.append(embeddings.register_forward_hook(self._embeddings_hook))
        return self

    def detach(self) -> None:
        """Remove every hook and restore the model's ``requires_grad`` flags. Idempotent."""
        for handle in self._handles:
            handle.remove()
        for p, flag in self._requires_grad:
            p.requires_grad_(flag)
        self._handles, self._requires_grad = [], []
        let_go(self._held)
        self._forget()
        for site in self.sites:
            if site.frozen is not None:
                module: Any = site.module
                module.weight, site.frozen = site.frozen, None

    def __enter__(self) -> LowRankAdapter:
        return self if self.attached else self.attach()

    def __exit__(self, *_: object) -> None:
        self.detach()

    @torch.no_grad()
    def weight_norms(self) -> list[Tensor]:
        """||W0||_F of each site, (L,) float64 on the CPU a group; of packed weights, as layers compute with them.

        Raises ModelError for a weight of zeros, or of which an entry is not finite.
        """
        norms = [torch.stack([_norm(site) for site in group.sites]) for group in self.groups]
        for group, found in zip(self.groups, norms, strict=True):
            seen = torch.isfinite(found) & (found > 0)
            if not bool(seen.all()):
                name = group.sites[seen.tolist().index(False)].name
                raise ModelError(
                    f"the frozen weight of {name!r} is all zeros, or has entries that are not finite",
                    why="method.relative_rate measures a module's steps by the norm of its weight, and it has none",
                    fix="leave it out with adapter.exclude_modules, or set method.relative_rate=false",
                )
        return norms

    def install(self, group: Group, left: Tensor, mid: Tensor, right: Tensor) -> None:
        """Set the operands of a group: left (L, m, r), mid (L, r), right (L, n, r); cast to each layer's dtype."""
        for k, site in enumerate(group.sites):
            weight = site.weight
            dtype = site.dtype or weight.dtype
            site.left, site.mid, site.right = (t[k].to(weight.device, dtype) for t in (left, mid, right))

    def met(self, group: Group) -> tuple[Tensor, Tensor]:
        """left (L, m, r) and right (L, n, r) with P = G right and Q = G^T left, as kept, for gradients G of a group."""
        left, right = zip(*map(self.met_at, group.sites), strict=True)
        return torch.stack(left), torch.stack(right)

    def met_at(self, site: Site) -> tuple[Tensor, Tensor]:
        """left (m, r) and right (n, r) of one site, where its operands are installed; see ``met``."""
        left, right = (self._operands(site, 1)[side].to(self.device) for side in (0, 2))
        return left[..., self.columns[1]], right[..., self.columns[0]]

    def install_update(self, group: Group, update: Tensor) -> None:
        """Let a group compute with W0 + update while attached; update: (L, m, n), any rank.

        The user's weight is not written to: another one stands in its place until ``detach``.
        """
        for k, site in enumerate(group.sites):
            if bits(site.module) is not None or not site.weight.dtype.is_floating_point:
                raise ModelError(
                    f"the weights of {site.name!r} are quantised, and this method adds a dense update to them",
                    why="packed weights cannot take it, and unpacked ones would need the memory that was to be saved",
                    fix="remove model.quantization, or use a method of low rank, such as prism or dp-adamw",
                )
            site.update = update[k]
            if self.attached:
                _show_update(site)

    def subtract(self, group: Group, a0: Tensor, b0: Tensor) -> None:
        """Train as if the frozen weights were W0 - A0 B0^T; a0: (L, m, k), b0: (L, n, k), public and fixed."""
        for k, site in enumerate(group.sites):
            site.offset = a0[k].to(site.weight.device), b0[k].to(site.weight.device)

    def relative_to_w0(
        self, factors: Mapping[str, tuple[Tensor, Tensor]]
    ) -> dict[str, tuple[Tensor, Tensor]]:
        """Site name -> (A, B) of the weight update relative to W0, a subtracted part included (its rank adds up)."""
        whole = dict(factors)
        for site in self.sites:
            if site.offset is not None:
                (a, b), (a0, b0) = whole[site.name], site.offset
                whole[site.name] = (
                    torch.cat([a, -a0.to(a)], dim=-1),
                    torch.cat([b, b0.to(b)], dim=-1),
                )
        return whole

    @contextmanager
    def without_terms(self) -> Iterator[None]:
        """Inside, passes are those of the base model, without gradients. Updates of whole weights stay."""
        for part in self.parts:
            part._off = True
        try:
            with torch.no_grad():
                yield
        finally:
            for part in self.parts:
                part._off = False

    @contextmanager
    def passing(self) -> Iterator[None]:
        """Inside, passes without a graph, of which nothing is gathered. Raises PrivacyError as ``captured`` does."""
        self._forget()
        self._passing = True
        try:
            with torch.no_grad():
                yield
        finally:
            self._passing = False
        self._check_complete()
        self._forget()

    @contextmanager
    def capture(self, records: Tensor, *, summed: bool = False) -> Iterator[None]:
        """Gather P and Q in the backward passes inside, of a micro-batch whose row i is record records[i], (rows,).

        ``summed`` adds the rows up at once (the non-private mode needs no per-example gradients).
        """
        self._rows, self._summed = len(records), summed
        self._forget()
        try:
            yield
        finally:
            self._rows = None

    def captured(self, unit_index: Tensor | None = None, units: int | None = None) -> Captured:
        """What the last ``capture`` gathered, added up over the rows of each privacy unit.

        unit_index: (rows,) int64, the unit of each row; None: each row is a unit. units: how many there are, if
        not the largest index + 1. Raises PrivacyError if a site was not reached, or if a parameter beside the
        adapter would train unclipped.
        """
        self._check_complete()
        found = Captured.of_stacks([self._stacks[g] for g in range(len(self.groups))])
        norms = [site.norms.to(self.device) for site in self.sites if site.norms is not None]
        self._forget()
        if unit_index is not None:
            if len(unit_index) != found.units:
                raise PrivacyError(
                    f"a micro-batch of {found.units} rows says of {len(unit_index)} whose they are",
                    why="a record's gradient would count as another unit's, or escape clipping",
                    fix="give the unit of each row that went through the model",
                )
            units = int(unit_index.max()) + 1 if units is None else units
            if not torch.equal(unit_index, torch.arange(units, device=unit_index.device)):
                found = found.added(unit_index, units)
                norms = [t.new_zeros(units).index_add_(0, unit_index.to(t.device), t) for t in norms]
        return replace(found, dense_squares=torch.stack(norms).square().sum(dim=0)) if norms else found

    def _forget(self) -> None:
        """Let go of what was gathered."""
        self._stacks = {}
        for site in self.sites:
            site.reached, site.norms = False, None

    def _check_complete(self) -> None:
        if not self.attached:
            raise PrivacyError(
                "the adapter is not attached to its model",
                why="the model would be trained without it, and nothing would be clipped",
                fix="write `with adapter:` around the training, or call adapter.attach()",
            )
        for site in self.sites:
            if not site.reached:
                raise PrivacyError(
                    f"module {site.name!r} got no gradient in this micro-batch",
                    why="its update would be pure noise, or worse, unclipped",
                    fix="exclude it with adapter.exclude_modules",
                )
        for name, p in self.model.named_parameters():
            if p.requires_grad:
                raise PrivacyError(
                    f"parameter {name!r} is trainable but not privatised",
                    why="its gradient is neither clipped nor noised",
                    fix="freeze it (requires_grad=False) or adapt its layer",
                )

    def _hook(self, site: Site) -> Any:
        def add_term(_: torch.nn.Module, args: tuple[Any, ...], y: Tensor) -> Tensor:
            if site.left is None or self._off:
                return y
            site.reached = site.reached or self._passing
            x = args[0]
            if site.dtype is not None and y.dtype != site.dtype:
                site.recast(y.dtype)
            if site.offset is not None:
                a0, b0 = (t.to(x.dtype) for t in site.offset)
                y = y - (x @ b0) @ a0.T
            if self.dropout and self._rows is not None:  # in training: gradients are being gathered
                x = torch.nn.functional.dropout(x, self.dropout)
            operands, shape = self._operands(site, y.shape[0]), y.shape
            if x.dim() > 3:  # as of heads: they are further places of the same row
                x, y = x.flatten(1, -2), y.flatten(1, -2)
            y = _LowRankTerm.apply(y, x.to(site.left.dtype), self._anchor, self, site, operands)
            return y if y.shape == shape else y.view(shape)

        return add_term

    def _operands(self, site: Site, rows: int) -> Operands:
        """What the rows of a pass meet at a site."""
        assert site.left is not None
        assert site.mid is not None
        assert site.right is not None
        return site.left, site.mid, site.right

    def _embeddings_hook(self, _: torch.nn.Module, __: Any, out: Tensor) -> Tensor:
        return out.requires_grad_(True) if torch.is_grad_enabled() and checkpoints(self.model) else out

    def _keep(self, site: Site, x: Tensor, xr: Tensor, e: Tensor, el: Tensor) -> None:
        if self._rows is None:
            raise PrivacyError(
                "a backward pass ran outside LowRankAdapter.capture",
                why="its gradients would escape clipping",
                fix="compute losses inside `with adapter.capture(records):`",
            )
        if x.dim() == 2 and site.name in self.pooled:
            x, xr, e, el = (t.unsqueeze(1) for t in (x, xr, e, el))
        if x.dim() != 3 or x.shape[0] != self._rows:
            raise PrivacyError(
                f"module {site.name!r} got input of shape {tuple(x.shape)}, not ({self._rows}, tokens, features)",
                why="the rows of different records cannot be told apart",
                fix="exclude it with adapter.exclude_modules (mixture-of-experts layers mix the rows)",
            )
        xr, el = xr[..., self.columns[0]], el[..., self.columns[1]]
        if self._summed:
            e, x, xr, el = (t.reshape(1, -1, t.shape[-1]) for t in (e, x, xr, el))
        g, k = self._places[site.name]
        if g not in self._stacks:
            of = len(self.groups[g].sites)
            self._stacks[g] = self._empty(of, xr, e), self._empty(of, el, x)
        for stack, narrow, wide in zip(self._stacks[g], (xr, el), (e, x), strict=True):
            self._put(stack[k], narrow, wide, add=site.reached)
        site.reached = True
        if self.dense_norms and not self._summed:
            norms = dense_norms(e, x)
            site.norms = norms if site.norms is None else site.norms + norms

    def _empty(self, sites: int, narrow: Tensor, wide: Tensor) -> Tensor:
        """Room for wide^T narrow of each row and site, transposed: (sites, rows, r, features), float32 or better."""
        rows, rank, features = len(narrow), narrow.shape[-1], wide.shape[-1]
        dtype = torch.promote_types(wide.dtype, torch.float32)
        device = self.device  # layers of one group may lie on several
        if self.in_order:
            return wide.new_empty(sites, rows, features, rank, dtype=dtype, device=device).mT
        return wide.new_empty(sites, rows, rank, features, dtype=dtype, device=device)

    def _put(self, place: Tensor, narrow: Tensor, wide: Tensor, *, add: bool) -> None:
        """Write (wide^T narrow)^T of each row into ``place`` (rows, r, features)."""
        # In the order in which the product lies in memory, so that it is written where it stays.
        left, right, place = (wide, narrow, place.mT) if self.in_order else (narrow, wide, place)
        if add:  # a layer that is called twice contributes one gradient: before any norm is taken
            place += torch.bmm(left.mT, right).to(place.device)
        elif (place.dtype, place.device) == (left.dtype, left.device):
            torch.bmm(left.mT, right, out=place)
        else:
            place.copy_(torch.bmm(left.mT, right))


def _norm(site: Site) -> Tensor:
    """||W0||_F in float64 on the CPU, from rows in float32 or better."""
    if site.frozen is None:
        weight = dense_weight(site.name, site.module)
    else:  # which plain layers alone have; a transposed one has the same norm
        weight = site.frozen.detach().to(torch.promote_types(site.frozen.dtype, torch.float32))
    return torch.linalg.vector_norm(torch.linalg.vector_norm(weight, dim=1).cpu().double())


@torch.no_grad()
def _show_update(site: Site) -> None:
    """Put W0 + update in the place of the layer's weight, computed in the update's dtype and rounded once."""
    if site.update is None:
        return
    module: Any = site.module
    if site.frozen is None:
        # A parameter of its own: where W0 is shared (tied embeddings), the other layer keeps it.
        site.frozen = module.weight
        module.weight = torch.nn.Parameter(module.weight.clone(), requires_grad=False)
    update = (site.update.T if is_conv1d(module) else site.update).to(site.weight.device)
    if module.weight.dtype == update.dtype:
        torch.add(site.weight, update, out=module.weight)
    else:
        module.weight.copy_(site.weight.to(update.dtype) + update)


def checkpoints(model: torch.nn.Module) -> bool:
    """Whether activations are recomputed in the backward pass."""
    name = "is_activation_checkpointing"  # transformers 5; before it, is_gradient_checkpointing
    return bool(getattr(model, name if hasattr(model, name) else "is_gradient_checkpointing", False))


def _group(sites: list[Site]) -> list[Group]:
    shapes: dict[tuple[int, int], list[Site]] = {}
    for site in sites:
        shapes.setdefault((site.m, site.n), []).append(site)
    return [Group(m, n, tuple(members)) for (m, n), members in shapes.items()]
