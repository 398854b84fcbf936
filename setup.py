"""The package amxq: pure Python, no compiler needed to install or to run."""

from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).resolve().parent

MODELS = ["transformers>=5.0", "safetensors>=0.5", "jinja2>=3.1"]
DEMO = ["auto-round>=0.16", "accelerate>=1.0", "gguf>=0.17", "tqdm>=4.60"]
BENCH = ["matplotlib>=3.8"]
PEERS = ["onnxruntime>=1.20", "onnx>=1.17", "openvino>=2025.0"]  # what benchmarks compare with
TEST = ["pytest>=8", "pytest-xdist>=3.5", "hypothesis>=6.100", "ruff>=0.9", "mypy>=1.13"]

setup(
    name="amxq",
    version="0.1.0",
    description="INT4 language models on x86 CPUs: kernels in a Triton-style language, "
    "compiled in-process by a compiler that is plain Python",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.10",
    packages=find_packages(include=["amxq", "amxq.*", "amxq_kernels", "amxq_kernels.*"]),
    package_data={"amxq": ["py.typed"], "amxq_kernels": ["py.typed", "*.json"]},
    install_requires=["torch>=2.6", "numpy>=1.26", "llvmlite>=0.44"],
    extras_require={
        "models": MODELS,
        "demo": MODELS + DEMO,
        "bench": BENCH,
        "peers": PEERS,
        "test": TEST,
        "all": MODELS + DEMO + BENCH,
    },
    entry_points={"console_scripts": ["amxq=amxq.cli:main"]},
    classifiers=[
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
