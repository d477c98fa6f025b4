"""Read a configuration of Ray Serve LLM: ``python read_ray.py CONFIG.yaml``, by a Python with Ray and vLLM.

Prints what Ray makes of it, an LLM per line as JSON, after a local Ray has built the application.
"""

import json
import sys
from pathlib import Path

import yaml
from ray.serve.llm import LLMServingArgs, build_openai_app
from ray.serve.schema import ServeDeploySchema
from vllm.engine.arg_utils import AsyncEngineArgs


def main() -> None:
    """Print what Ray reads."""
    document = ServeDeploySchema.model_validate(yaml.safe_load(Path(sys.argv[1]).read_text()))
    (application,) = document.applications
    build_openai_app(application.args)
    lines = []
    for config in LLMServingArgs.model_validate(application.args).llm_configs:
        engine = AsyncEngineArgs(**config.engine_kwargs)
        multiplex = config.multiplex_config()
        found = {
            "import_path": application.import_path,
            "model_id": config.model_id,
            "model_source": config.model_loading_config.model_source,
            "accelerator_type": config.accelerator_type,
            "replicas": config.deployment_config["num_replicas"],
            "adapters_path": config.lora_config and config.lora_config.dynamic_lora_loading_path,
            "adapters": multiplex and multiplex.max_num_models_per_replica,
            "engine": {name: getattr(engine, name) for name in config.engine_kwargs},
        }
        lines.append(f"{json.dumps(found)}\n")
    sys.stdout.write("".join(lines))


if __name__ == "__main__":
    main()
