# shellcheck shell=bash
# To be sourced, in any folder: source path/to/env.sh. It puts the command on the PATH and allows
# two things that Open MPI's mpirun refuses by default: to start more ranks than cores, and to start
# them as root (which needs two variables). In containers one process may not copy from another.

# Bash and zsh give a sourced file its own name. Other shells do not: there it is taken from the
# current folder.
if [ -n "${BASH_SOURCE:-}" ]; then
  # shellcheck disable=SC2128 # its first element is this file
  _longspan_file=$BASH_SOURCE
  if [ "$_longspan_file" = "$0" ]; then
    echo 'longspan: env.sh changes the shell that sources it: source ./env.sh' >&2
    exit 1
  fi
elif [ -n "${ZSH_VERSION:-}" ]; then
  eval '_longspan_file=${(%):-%x}'
elif grep -qs '^# To be sourced, in any folder: source path/to/env.sh' ./env.sh; then
  _longspan_file=./env.sh
else
  echo 'longspan: this shell does not say where env.sh is: go to the folder of env.sh, then . ./env.sh' >&2
  return 1
fi
_longspan_file=$(readlink -f -- "$_longspan_file") || return 1
case ${LONGSPAN_BUILD_DIR:-build/default} in
  /*) PATH="$LONGSPAN_BUILD_DIR/bin:$PATH" ;;
  *) PATH="${_longspan_file%/*}/${LONGSPAN_BUILD_DIR:-build/default}/bin:$PATH" ;;
esac
export PATH
case $- in # users are told what is missing; setup.sh sources it before a build exists
  *i*) command -v longspan >/dev/null ||
    echo "longspan: the command is not built yet: ${_longspan_file%/*}/setup.sh builds it" >&2 ;;
esac
unset _longspan_file
if [ "$(id -u)" -eq 0 ]; then export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1; fi
export OMPI_MCA_rmaps_base_oversubscribe=1 OMPI_MCA_hwloc_base_binding_policy=none
export OMPI_MCA_btl_vader_single_copy_mechanism=none
