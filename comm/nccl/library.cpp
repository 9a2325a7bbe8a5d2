// The entry of longspan::nccl in the table of libraries.
#include <fmt/format.h>
#include <nccl.h>

#include "comm/libraries.hpp"
#include "comm/nccl/registration.hpp"
#include "comm/nccl/transport.hpp"

namespace longspan::comm {
namespace {

std::string text_of(int code) {
  return fmt::format("{}.{}.{}", code / 10000, code % 10000 / 100, code % 100);
}

std::string version() {
  int found = 0;
  ncclGetVersion(&found);
  return fmt::format("{} (built with {})", text_of(found), text_of(NCCL_VERSION_CODE));
}

constexpr NcclLibrary kLibrary{.connect = nccl_bootstrap, .version = version};

}  // namespace

bool register_nccl() {
  register_library(kLibrary);
  return true;
}

}  // namespace longspan::comm
