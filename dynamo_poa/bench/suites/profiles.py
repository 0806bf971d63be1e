"""Which timing a simulated worker has: profiles by name, of GPUs and models nobody here owns.

Owns: where the profiles' files are, which there are, what each says of itself.
Does not own: how they were made (`profile_maker.py`), how a profiler's results become one
              (profiler_results.py), how the engine interpolates.
Invariant: a profile is two files of one name: the tables (npz, as the mock engine reads them) and, in JSON,
           where its numbers come from.
Source:   host: dynamo/mocker/utils/planner_profiler_perf_data_converter.py.
"""

import atexit
import functools
import shutil
import tempfile
from pathlib import Path

import msgspec

from dynamo_poa.bench.suites.profiler_results import write_tables
from dynamo_poa.errors import ConfigError

FOLDER = Path(__file__).parent / "profiles"


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """What a profile says of itself.

    kv_blocks:  of 16 tokens that fit beside the weights, for `Fleet.kv_blocks`
    source:     where the numbers come from
    """

    name: str
    gpu: str
    model: str
    tensor_parallel: int
    kv_blocks: int
    source: str


def names() -> list[str]:
    """Return the profiles there are."""
    return sorted(path.stem for path in FOLDER.glob("*.npz"))


def path_of(profile: str) -> Path:
    """Return a profile's tables, by its name or by the path of an npz file or a profiler's results.

    Raises:  ConfigError when there is neither, or a folder holds no results.
    """
    if profile in names():
        return FOLDER / f"{profile}.npz"
    path = Path(profile)
    if path.is_dir():
        return _converted(path)
    if path.is_file():
        return path
    raise ConfigError([f"profile = {profile!r}: must be a path or one of {', '.join(names())}"])


@functools.cache  # once for each process
def _converted(folder: Path) -> Path:
    temporary = Path(tempfile.mkdtemp(prefix="dynamo-poa-profile-"))
    atexit.register(shutil.rmtree, temporary, ignore_errors=True)
    write_tables(folder, temporary / "tables.npz")
    return temporary / "tables.npz"


def about(profile: str) -> Profile:
    """Return what a profile says of itself.

    Raises:  ConfigError when there is none of that name.
    """
    return msgspec.json.decode(path_of(profile).with_suffix(".json").read_bytes(), type=Profile)
