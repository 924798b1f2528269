"""The project runs from a clone: a wheel would install packages named `assets` and `resources` beside others."""

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel


class FromAClone(bdist_wheel):
    """Refuses to build a wheel; `pip install -e .` builds none."""

    def run(self) -> None:
        raise SystemExit("toolformer-dag runs from a clone: `git clone`, then `make demo` or `pip install -e .`")


setup(cmdclass={"bdist_wheel": FromAClone})
