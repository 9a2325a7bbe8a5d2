#include "comm/libraries.hpp"

namespace longspan::comm {
namespace {

// Constants, so that they exist before the first initialiser of any file runs.
constinit const MpiLibrary* the_mpi = nullptr;
constinit const NcclLibrary* the_nccl = nullptr;

}  // namespace

const MpiLibrary* mpi_library() { return the_mpi; }
const NcclLibrary* nccl_library() { return the_nccl; }

void register_library(const MpiLibrary& library) { the_mpi = &library; }
void register_library(const NcclLibrary& library) { the_nccl = &library; }

}  // namespace longspan::comm
