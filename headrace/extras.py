"""Find the extra of the package that contains a missing module."""

from __future__ import annotations

EXTRA_OF = {
    "typer": "cli",
    "rich": "cli",
    "uvicorn": "collector",
    "uvloop": "collector",
    "httptools": "collector",
    "prometheus_client": "collector",
    "blake3": "collector",
    "pyarrow": "collector",
    "watchdog": "collector",
    "sqlalchemy": "sql",
    "duckdb": "import",
    "h5py": "hdf5",
    "torch": "train",
    "onnxruntime": "onnx",
    "onnx": "export",
    "onnxscript": "export",
    "torchrl": "torchrl",
    "tensordict": "torchrl",
    "tensorboard": "tensorboard",
    "mlflow": "mlflow",
    "alembic": "mlflow",
    "wandb": "wandb",
    "gymnasium": "train",
    "pandas": "train",
    "fastparquet": "train",
    "scipy": "train",
    "matplotlib": "train",
}


def missing_extra(missing: ModuleNotFoundError, what: str) -> ModuleNotFoundError | None:
    """An error that names the extra to install for `what`; None if the module is in no extra."""
    extra = EXTRA_OF.get((missing.name or "").partition(".")[0])
    if extra is None:
        return None
    text = f"{what} needs {missing.name}, which is not installed: pip install 'headrace[{extra}]'"
    if extra == "cli":  # the [cli] extra alone can neither collect nor train
        text += ", or 'headrace[collector]' to collect, 'headrace[train]' to train: both include it"
    return ModuleNotFoundError(text, name=missing.name)
