// The object file that the target longspan::nccl puts into every program that links it, for the
// reason in comm/mpi/registration.cpp.
#include "comm/nccl/registration.hpp"

namespace {

[[maybe_unused]] const bool registered = longspan::comm::register_nccl();

}  // namespace
