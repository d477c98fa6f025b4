"""Rules of a pool that adapters and KV share: S-LoRA, Chameleon, and policies between them."""
