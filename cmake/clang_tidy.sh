#!/usr/bin/env bash
# Runs clang-tidy (.clang-tidy) over the C++ files of a CPU build: those of src, comm, launcher and
# kernels/host, or the named ones. Fails if it finds anything.
#   cmake/clang_tidy.sh [files...]
# Most of its time goes into headers. So it reads the files of a folder as one text, and one by one if it
# finds anything there, or two files define the same name.
set -euo pipefail
cd "$(dirname "$0")/.."
cmake --preset host -B build/tidy -DLONGSPAN_FAST_BUILD=OFF -DLONGSPAN_HOST_TARGETS=all >/dev/null
folder=$(mktemp -d)
trap 'rm -r "$folder"' EXIT
python3 - build/tidy/compile_commands.json "$folder" "$@" >"$folder/groups" <<'EOF'
import json, os, pathlib, re, sys
source, folder, *named = sys.argv[1:]
commands = {}  # a file that is compiled in several ways, for tests with stand-ins, is read once
for entry in json.loads(pathlib.Path(source).read_text(encoding="utf-8")):
    commands.setdefault(os.path.relpath(entry["file"]), entry)
files = [os.path.relpath(name) for name in named] or sorted(
    name for name in commands if re.match(r"(src|comm|launcher|kernels/host)/.*\.cpp$", name))
groups = {}
for name in files:
    if name not in commands:
        sys.exit(f"{name}: {source} does not compile it")
    options = commands[name]["command"].split(" -o ")[0]
    # These define what their neighbours define: each has the same functions, or is compiled several times.
    alone = re.match(r"kernels/host/|src/strategy/(one|two)_level/", name)
    groups.setdefault(name if alone else (os.path.dirname(name), options), []).append((name, options))
together = []
for group in groups.values():
    parts = -(-len(group) // 12)
    for part in (group[i::parts] for i in range(parts)):
        names, options = [name for name, _ in part], part[0][1]
        path = os.path.join(folder, names[0].replace("/", "_"))
        pathlib.Path(path).write_text("\n".join(pathlib.Path(name).read_text(encoding="utf-8") for name in names))
        together.append({**commands[names[0]], "file": path, "command": f"{options} -c {path}"})
        print(path if len(names) > 1 else names[0], *names)
(pathlib.Path(folder) / "compile_commands.json").write_text(json.dumps([*commands.values(), *together]))
EOF
export folder
# shellcheck disable=SC2016 # it is expanded by the shell that xargs starts
xargs -a "$folder/groups" -d '\n' -n 1 -P "$(nproc)" bash -c '
  read -r first names <<<"$1"
  if [ "$first" != "$names" ]; then
    ! clang-tidy --quiet --config-file=.clang-tidy -p "$folder" "$first" >/dev/null 2>&1 || exit 0
  fi
  rc=0
  for name in $names; do clang-tidy --quiet -p "$folder" "$name" || rc=1; done
  exit $rc' tidy
