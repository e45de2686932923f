"""What Triton calls the types of arrays."""

TYPES = {
    "bfloat16": "bf16",
    "float32": "fp32",
    "uint32": "u32",
    "int32": "i32",
    "uint16": "u16",
    "uint8": "u8",
    "bool": "i1",
}
