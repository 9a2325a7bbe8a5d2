// The object file that the target longspan::nccl puts into every program that links it. The twin in
// comm/mpi/ says why.
#include "comm/nccl/registration.hpp"

namespace {

[[maybe_unused]] const bool registered = longspan::comm::register_nccl();

}  // namespace
