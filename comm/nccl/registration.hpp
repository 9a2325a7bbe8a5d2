// How longspan::nccl enters the table of comm/libraries.hpp.
#pragma once

namespace longspan::comm {

/// Always true: for an initialiser.
bool register_nccl();

}  // namespace longspan::comm
