"""Times the low-rank products of many adapters, half by half; `capplan.models.kernel_fits` explains them."""
