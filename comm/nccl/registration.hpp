// Registers longspan::nccl in the table of comm/libraries.hpp.
#pragma once

namespace longspan::comm {

/// Registers the library. It is always true, so that an initialiser can call it.
bool register_nccl();

}  // namespace longspan::comm
