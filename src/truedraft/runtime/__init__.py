"""How a pass is made fast on the machine at hand."""

QUANTIZED = ("int8", "int4")  # kinds of weights that `quantize.py` makes
