"""Methods of sharing experience, one file each; `hacrl methods` lists them. They need no torch to be listed.

HACPO, GSPO, GRPO and naive sharing are settings of `hacrl_core/algorithm/hacpo.py` and need no file.
"""

from hacrl_core.methods import cispo, luffy, prp, raft_foreign, sgt, topr, xgrpo
from hacrl_core.methods.method import Method

METHODS: dict[str, Method] = {
    module.METHOD.name: module.METHOD for module in (raft_foreign, topr, cispo, luffy, prp, xgrpo, sgt)
}

__all__ = ["METHODS", "Method"]
