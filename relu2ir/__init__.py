"""relu2ir: declare an elementwise op once, run it fused everywhere."""
