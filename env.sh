# shellcheck shell=bash
# To be sourced, in the folder of the clone: source ./env.sh. It puts the command on the PATH and lets
# Open MPI's mpirun do what it refuses by itself: start more ranks than there are cores, and start
# them as root (which asks twice). In containers one process may not copy from another.
case ${LONGSPAN_BUILD_DIR:-build/default} in
  /*) export PATH="$LONGSPAN_BUILD_DIR/bin:$PATH" ;;
  *) export PATH="$PWD/${LONGSPAN_BUILD_DIR:-build/default}/bin:$PATH" ;;
esac
if [ "$(id -u)" -eq 0 ]; then export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1; fi
export OMPI_MCA_rmaps_base_oversubscribe=1 OMPI_MCA_hwloc_base_binding_policy=none
export OMPI_MCA_btl_vader_single_copy_mechanism=none
