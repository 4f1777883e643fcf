"""Shell completion: scripts that a shell reads, and what they complete."""

import shutil
import subprocess

import pytest

from ntkmarglik.programs import main as front

# what bash has set when a key is pressed after these words
PRESS = """
. "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMP_LINE="$*"; COMP_POINT=${#COMP_LINE}
$(complete -p ntk-marglik | sed 's/.*-F \\([^ ]*\\).*/\\1/')
echo "${COMPREPLY[@]}"
"""


def printed(capsys, *arguments):
    with pytest.raises(SystemExit) as end:
        front.main([*arguments])
    assert not end.value.code
    return capsys.readouterr().out


@pytest.fixture(autouse=True)
def name(monkeypatch):
    monkeypatch.setattr("sys.argv", ["ntk-marglik"])


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_a_program_prints_a_script_of_its_flags(shell, capsys):
    text = printed(capsys, "run", "--tyro-print-completion", shell)
    assert "--subset" in text and "classification_image" in text


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
def test_bash_completes_commands_and_flags(capsys, tmp_path):
    path = tmp_path / "completion.sh"
    path.write_text(printed(capsys, "--tyro-print-completion", "bash"))
    for words, answer in (
        ("doc", "doctor"),
        ("run --sub", "--subset"),
        ("grid --poi", "--points"),
        ("run --pres", "--preset"),
        ("run --preset paper-mnist-rotated-", "paper-mnist-rotated-small"),
        ("grid --conf", "--config"),
    ):
        done = subprocess.run(
            ["bash", "-c", PRESS, "bash", str(path), "ntk-marglik", *words.split()],
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.split() == [answer], done.stderr
