// Writes `longspan info [--features | --kernels | --options]`, `longspan env` and `longspan run
// --list-strategies` as text for rank 0 to print.
#pragma once

#include <string>

namespace longspan::launcher {

std::string info_text(const std::string& world, bool json);
std::string features_text(bool json);
std::string kernels_text(bool json);
std::string options_text(bool json);
std::string environment_text(bool json);
std::string strategies_text();

}  // namespace longspan::launcher
