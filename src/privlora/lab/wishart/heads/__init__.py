"""Linear heads on fixed features, hundreds at once, each trained privately.

Features are computed beforehand by something public and frozen, so a head's gradient for one record is rank one,
(softmax - one-hot) x^T, its norm has a closed form, and N heads train as one batched matrix product.
"""
