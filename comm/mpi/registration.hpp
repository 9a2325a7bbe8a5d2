// Registers longspan::mpi in the table of comm/libraries.hpp.
#pragma once

namespace longspan::comm {

/// Registers the library. It is always true, so that an initialiser can call it.
bool register_mpi();

}  // namespace longspan::comm
