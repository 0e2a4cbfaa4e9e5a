"""Compiled code that came with somebody else's run folder is never loaded; one's own is."""

import shutil
import stat

import pytest

from lengthwise.cli.compiler_cache import set_aside_foreign


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def test_code_that_this_user_made_stays_where_it_is(tmp_path, home):
    compiler = tmp_path / "run" / "compiler"
    compiler.parent.mkdir()
    assert set_aside_foreign(compiler) is None
    (compiler / "kernel.so").write_text("ours")
    assert set_aside_foreign(compiler) is None
    assert (compiler / "kernel.so").read_text() == "ours"
    assert stat.S_IMODE((home / "lengthwise" / "secret").stat().st_mode) == 0o600


@pytest.mark.parametrize("comes_as", ["copied", "unmarked", "of another user", "a link"])
def test_code_that_came_from_elsewhere_is_set_aside(tmp_path, home, comes_as):
    run = tmp_path / "run"
    run.mkdir()
    other = tmp_path / "other" / "compiler"
    other.parent.mkdir()
    set_aside_foreign(other)
    (other / "kernel.so").write_text("theirs")
    compiler = run / "compiler"
    if comes_as == "copied":
        shutil.copytree(other, compiler)
    elif comes_as == "a link":
        compiler.symlink_to(other)
    else:
        other.rename(compiler)
        if comes_as == "unmarked":
            (compiler / "made_by_this_user").unlink()
        else:
            shutil.rmtree(home)
    aside = set_aside_foreign(compiler)
    assert aside is not None and (aside / "kernel.so").read_text() == "theirs"
    assert [path.name for path in compiler.iterdir()] == ["made_by_this_user"]
    assert set_aside_foreign(compiler) is None
