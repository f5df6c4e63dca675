"""Keep pydantic from looking for plug-ins: none is used here, and the search is a tenth of a short command's time.

Owns: `leave_out_plugins`. The environment variable stops the search, which reads the metadata of every installed
package; it does not stop the import of the module that would search, nor of importlib.metadata, email and zipfile with
it. So that module is stood in for by one that knows no plug-ins.

Promises: whatever else a release of pydantic asks of that module, it gets from the real one. Does not do: anything once
pydantic has loaded it, so the order of imports changes no result, only the time.
"""

from __future__ import annotations

import importlib
import os
import sys
from types import ModuleType
from typing import Any

_LOADER = "pydantic.plugin._loader"


class _NoPlugins(ModuleType):
    """Stands in for pydantic's loader of plug-ins."""

    @staticmethod
    def get_plugins() -> tuple[()]:
        """Return the plug-ins: none."""
        return ()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # The import system asks for these of any module, and takes no for an answer.
            raise AttributeError(name)
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        return getattr(importlib.import_module(self.__name__), name)


def leave_out_plugins() -> None:
    """Turn plug-ins off for this process and its children, before pydantic is imported."""
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    if os.environ["PYDANTIC_DISABLE_PLUGINS"] == "__all__":
        sys.modules.setdefault(_LOADER, _NoPlugins(_LOADER))
