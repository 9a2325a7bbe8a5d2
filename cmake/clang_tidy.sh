#!/usr/bin/env bash
# clang-tidy (.clang-tidy) over the C++ files of a build for processors, each by itself: those of src,
# comm, launcher and kernels/host, or the ones that are named. Fails where there is a finding.
#   cmake/clang_tidy.sh [files...]
set -euo pipefail
cd "$(dirname "$0")/.."
cmake --preset host -B build/tidy -DLONGSPAN_FAST_BUILD=OFF -DLONGSPAN_HOST_TARGETS=all >/dev/null
# A file that is compiled in several ways, for tests with stand-ins, is looked at once.
once=$(mktemp -d)
trap 'rm -r "$once"' EXIT
python3 - build/tidy/compile_commands.json "$once" "$@" >"$once/files" <<'EOF'
import json, os, pathlib, re, sys
source, folder, *named = sys.argv[1:]
commands = {}
for entry in json.loads(pathlib.Path(source).read_text(encoding="utf-8")):
    commands.setdefault(os.path.relpath(entry["file"]), entry)
files = [os.path.relpath(name) for name in named] or sorted(
    name for name in commands if re.match(r"(src|comm|launcher|kernels/host)/.*\.cpp$", name))
for name in files:
    if name not in commands:
        sys.exit(f"{name}: {source} does not compile it")
(pathlib.Path(folder) / "compile_commands.json").write_text(json.dumps(list(commands.values())))
print("\n".join(files))
EOF
xargs -a "$once/files" -d '\n' -n 1 -P "$(nproc)" clang-tidy --quiet -p "$once"
