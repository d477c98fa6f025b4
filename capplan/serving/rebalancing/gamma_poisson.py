"""Demand by the Gamma-Poisson model: the last window, shrunk to the mean of the recent ones.

A window with few requests of an adapter says little about its rate. The number of its requests is Poisson;
its rate varies over windows by a Gamma distribution of mean m and squared coefficient of variation k. Given
n requests in the last window, the mean of the posterior is ``m + z (n - m)`` with ``z = k m / (1 + k m)``
(empirical Bayes). Hot adapters follow their last window, cold ones their mean, and all follow their mean if
their counts vary no more than Poisson counts do.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def posterior_tok_s(tok_s: NDArray[np.float64], requests: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the demand of the next window in tokens per second, shape (adapters,).

    The mean m is that of the adapter, k is that of all adapters together, by the method of moments of the
    negative binomial distribution. Tokens per request are those of the adapter over all windows.

    Parameters
    ----------
    tok_s, requests
        Tokens per second, and number of requests, by window and adapter, shape (windows, adapters); at least
        two windows of one length.
    """
    mean = requests.mean(axis=0)
    excess = float((requests.var(axis=0, ddof=1) - mean).sum())
    squares = float((mean**2).sum())
    variation = max(0.0, excess) / squares if squares else 0.0
    weight = variation * mean / (1.0 + variation * mean)
    expected = mean + weight * (requests[-1] - mean)
    tok_s_per_request = np.divide(
        tok_s.sum(axis=0), requests.sum(axis=0), out=np.zeros_like(mean), where=mean > 0.0
    )
    return np.asarray(expected * tok_s_per_request)
