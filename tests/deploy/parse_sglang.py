"""Parse command lines of SGLang: ``python parse_sglang.py COMMAND_LINES.json``, by a Python that has it.

Prints the values that SGLang reads, as a list of JSON objects.
"""

import argparse
import json
import sys
from pathlib import Path

from sglang.srt.arg_groups.lora_hook import check_lora_server_args
from sglang.srt.arg_groups.overrides import resolving_view
from sglang.srt.server_args import ServerArgs

READ = (
    *("model_path", "port", "tp_size", "enable_lora", "max_loras_per_batch", "max_loaded_loras"),
    *("max_lora_rank", "max_running_requests", "chunked_prefill_size", "mem_fraction_static"),
    *("context_length", "disable_radix_cache", "quantization", "kv_cache_dtype"),
)


def main() -> None:
    """Print what SGLang reads."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    ServerArgs.add_cli_args(parser)
    found = []
    for words in json.loads(Path(sys.argv[1]).read_text()):
        given = ServerArgs.from_cli_args(parser.parse_args(words))
        check_lora_server_args(given)
        resolved = resolving_view(given)
        modules, adapters = resolved.lora_target_modules, resolved.lora_paths or ()
        found.append(
            {
                **{name: getattr(resolved, name) for name in READ},
                "lora_target_modules": None if modules is None else sorted(modules),
                "lora_paths": {each.lora_name: each.lora_path for each in adapters},
            }
        )
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main()
