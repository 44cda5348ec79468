"""What each folder may import: our folders and modules, and third-party packages.

These lists of permitted imports complement the contracts of pyproject.toml, which forbid imports.
`test_folders.py` compares them with every import, also those inside functions. A new line here is a
new dependency of the folder; mention it in the folder's `__init__`.
"""

from __future__ import annotations

# folder -> our folders, then third-party packages. `headrace/__init__` may name everything.
MAY_IMPORT = {
    "headrace": (
        "headrace.cli headrace.extras ingest.protocol ingest.server storage.declarations"
        " storage.errors storage.system typer"
    ),
    "headrace.cli": (
        "headrace.demo headrace.extras headrace.output headrace.up ingest.access"
        " ingest.backup ingest.client ingest.collector ingest.delivery ingest.episodes"
        " ingest.erasure ingest.importing ingest.protocol ingest.server ingest.status"
        " ingest.verification policy.algorithms policy.data policy.exporting policy.inference"
        " policy.judging policy.tracking policy.training storage.declarations storage.errors"
        " storage.experience storage.journal storage.maintenance storage.objects"
        " storage.system storage.verify storage.weights storage.wording msgspec typer"
    ),
    "headrace.compat": "ingest.client storage.wording",
    "headrace.rllib": (
        "ingest.embedded policy.exporting policy.inference policy.networks storage.declarations"
        " storage.errors storage.experience storage.reading storage.spaces gymnasium numpy ray"
        " torch"
    ),
    "headrace.demo": (
        "headrace.output ingest.client ingest.protocol storage.declarations storage.reading"
        " storage.spaces storage.wording gymnasium matplotlib numpy pyarrow urllib3"
    ),
    "headrace.output": "ingest.status storage.wording rich",
    # `backup` copies roots; `verification` compares journals, shards and indexes
    "ingest": (
        "ingest.access ingest.client ingest.collector ingest.delivery ingest.episodes"
        " ingest.erasure ingest.protocol storage.declarations storage.errors"
        " storage.experience storage.journal storage.maintenance storage.objects"
        " storage.shards storage.system storage.verify msgspec"
    ),
    # a declaration that redacts needs a key, which is stored with the tokens
    "ingest.access": (
        "ingest.protocol storage.declarations storage.errors storage.system storage.wording msgspec"
    ),
    # Arrow is imported by `importlib`, at the first request
    "ingest.bulk_import": (
        "ingest.access ingest.collector ingest.columns ingest.episodes ingest.protocol ingest.web"
        " storage.declarations storage.experience storage.spaces storage.wording msgspec numpy"
    ),
    "ingest.client": (
        "ingest.delivery ingest.protocol policy.inference storage.declarations storage.errors"
        " storage.experience storage.system storage.weights storage.wording msgspec numpy requests"
    ),
    # urllib3 parses the requested address
    "ingest.collector": (
        "ingest.access ingest.episodes ingest.histogram ingest.protocol policy.inference"
        " storage.declarations storage.errors storage.experience storage.journal storage.objects"
        " storage.shards storage.spaces storage.system storage.weights storage.wording msgspec"
        " numpy urllib3"
    ),
    # Arrow is imported by `importlib`, at the first request
    "ingest.columns": "ingest.protocol storage.experience storage.spaces numpy",
    "ingest.delivery": (
        "ingest.protocol storage.declarations storage.errors storage.experience storage.spaces"
        " storage.system storage.wording msgspec numpy opentelemetry urllib3"
    ),
    "ingest.embedded": (
        "ingest.client ingest.collector ingest.delivery ingest.protocol ingest.server"
        " storage.declarations storage.errors storage.experience storage.objects"
        " storage.reading storage.spaces storage.weights storage.wording msgspec numpy uvloop"
    ),
    "ingest.episodes": (
        "ingest.protocol storage.declarations storage.experience storage.spaces storage.wording"
        " msgspec numpy"
    ),
    "ingest.erasure": (
        "ingest.collector ingest.delivery ingest.episodes ingest.protocol ingest.verification"
        " storage.declarations storage.experience storage.journal storage.maintenance"
        " storage.system storage.verify msgspec numpy"
    ),
    # ADBC drivers are imported by `importlib`, if a URL names them
    "ingest.importing": (
        "ingest.columns ingest.delivery ingest.protocol storage.declarations storage.errors"
        " storage.experience storage.spaces storage.system storage.wording duckdb msgspec"
        " numpy pyarrow sqlalchemy"
    ),
    # `shards` reads those of a root
    "ingest.importing.formats": (
        "ingest.importing ingest.protocol storage.experience storage.reading storage.spaces"
        " storage.wording h5py msgspec numpy pyarrow"
    ),
    "ingest.protocol": "msgspec",
    # gymnasium: the space of an environment's name, in `declare`
    "ingest.server": (
        "ingest.access ingest.bulk_import ingest.collector ingest.episodes ingest.erasure"
        " ingest.histogram ingest.protocol ingest.status ingest.web storage"
        " storage.declarations storage.errors storage.experience storage.objects"
        " storage.shards storage.spaces storage.system storage.weights storage.wording"
        " gymnasium msgspec numpy prometheus_client urllib3 uvicorn uvloop"
    ),
    "ingest.status": "storage.experience storage.wording",
    # the caller is part of a request
    "ingest.web": "ingest.access ingest.histogram ingest.protocol httptools msgspec uvicorn",
    "policy": "storage.wording alembic mlflow tensorboard torch wandb",
    # The reader's ledger is part of `Learner`'s checkpoint. gymnasium: `TrainablePolicy`
    # is made of an environment's spaces
    "policy.algorithms": (
        "policy.inference policy.networks policy.ope policy.progress storage.conformance"
        " storage.errors storage.experience storage.reading storage.spaces storage.system"
        " storage.weights storage.wording gymnasium msgspec numpy safetensors tensordict torch"
        " torchrl"
    ),
    "policy.data": (
        "policy.progress storage.declarations storage.errors storage.experience"
        " storage.objects storage.reading storage.shards storage.spaces storage.system"
        " storage.weights storage.wording msgspec numpy"
    ),
    # `vector_env` splits nested observations as acting does
    "policy.envs": (
        "policy.inference storage.conformance storage.experience storage.spaces storage.wording"
        " gymnasium numpy torch"
    ),
    # `weight_store` refuses weights that cannot act; onnx and onnxruntime, if installed, for ONNX
    "policy.inference": (
        "storage.declarations storage.errors storage.objects storage.spaces storage.system"
        " storage.weights numpy onnx onnxruntime"
    ),
    "policy.judging": (
        "policy.data policy.inference policy.ope policy.progress policy.tracking"
        " storage.declarations storage.errors storage.experience storage.objects"
        " storage.reading storage.spaces storage.system storage.weights storage.wording"
        " matplotlib numpy"
    ),
    # `own_modules` compares what it exports on observations of the log
    "policy.networks": (
        "policy.inference storage.experience storage.objects storage.reading storage.spaces"
        " storage.system numpy onnxscript safetensors torch"
    ),
    "policy.ope": "storage.experience storage.wording numpy scipy",
    # advantages are those of PPO
    "policy.sampling": (
        "policy.algorithms policy.envs policy.inference storage.experience storage.spaces numpy"
    ),
    "policy.exporting": (
        "policy.algorithms policy.data policy.inference storage.errors storage.experience"
        " storage.objects storage.reading storage.spaces storage.system h5py msgspec numpy pyarrow"
        " ray torch"
    ),
    "policy.training": (
        "policy.algorithms policy.data policy.inference policy.networks policy.progress"
        " policy.tracking storage.declarations storage.errors storage.experience"
        " storage.objects storage.reading storage.spaces storage.system storage.weights"
        " storage.wording msgspec numpy torch"
    ),
    # estimates of the data that is read are part of a worker's metrics
    "policy.worker": (
        "policy.algorithms policy.envs policy.inference policy.networks policy.ope"
        " policy.sampling storage.declarations storage.errors storage.experience storage.spaces"
        " storage.system storage.wording gymnasium numpy ray"
    ),
    # `__main__` starts the writer and the second reader
    "storage": "storage.errors storage.maintenance storage.shards storage.system storage.verify",
    "storage.declarations": (
        "storage.errors storage.experience storage.objects storage.spaces storage.system"
    ),
    # inside functions, if installed: Arrow compresses columns, all three accept batches
    "storage.experience": (
        "storage.conformance storage.errors storage.wording msgspec numpy pandas pyarrow torch"
    ),
    "storage.journal": "storage.errors storage.experience storage.system storage.wording msgspec",
    "storage.maintenance": (
        "storage.declarations storage.errors storage.experience storage.journal storage.objects"
        " storage.reading storage.shards storage.system storage.verify storage.weights"
        " storage.wording duckdb msgspec numpy pyarrow"
    ),
    "storage.reading": (
        "storage.conformance storage.declarations storage.errors storage.experience"
        " storage.objects storage.shards storage.spaces storage.system storage.wording numpy"
        " pyarrow torch watchdog"
    ),
    "storage.shards": (
        "storage.declarations storage.errors storage.experience storage.objects storage.spaces"
        " storage.system blake3 msgspec numpy pandas pyarrow"
    ),
    "storage.objects": "storage.conformance storage.errors storage.system",
    "storage.spaces": "gymnasium numpy",
    "storage.system": "storage.errors",
    "storage.verify": (
        "storage.declarations storage.errors storage.experience storage.journal storage.objects"
        " storage.shards storage.system storage.weights storage.wording fastparquet msgspec"
        " numpy pandas pyarrow"
    ),
    "storage.weights": (
        "storage.declarations storage.errors storage.experience storage.objects storage.system"
        " storage.wording numpy safetensors"
    ),
}

# Pure folder -> the standard modules that it imports, directly or indirectly.
MAY_REACH_STDLIB = {
    "ingest.episodes": (
        "array base64 bisect collections contextlib dataclasses functools hashlib heapq hmac json"
        " math operator re reprlib struct typing unicodedata"
    ),
    "ingest.protocol": "collections dataclasses typing",
    "policy.ope": "collections dataclasses math typing",
    "storage.experience": (
        "abc bisect collections dataclasses functools hashlib json math operator typing zlib"
    ),
}

# The same for third-party packages, for folders that a service loads or that stay pure.
MAY_REACH_PACKAGES = {
    "ingest.client": "msgspec numpy onnxruntime opentelemetry requests safetensors urllib3",
    "ingest.delivery": "msgspec numpy opentelemetry urllib3",
    "ingest.episodes": "msgspec numpy",
    "ingest.protocol": "msgspec",
    "policy.inference": "msgspec numpy onnx onnxruntime safetensors",
    "policy.ope": "numpy scipy",
    "storage.experience": "msgspec numpy pandas pyarrow torch",
}
