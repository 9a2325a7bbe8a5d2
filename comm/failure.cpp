#include "comm/failure.hpp"

#include "comm/wire.hpp"

namespace longspan::comm {

void throw_failure(const Failure& failure) {
  if (failure.kind == ErrorKind::backend) throw BackendError(failure.what);
  throw RankError(failure.kind, failure.rank, failure.step, failure.what);
}

std::string to_text(const Failure& failure) {
  return pack(std::to_string(static_cast<int>(failure.kind)), std::to_string(failure.rank),
              failure.step, failure.what);
}

Failure failure_from(const std::string& text) {
  const auto parts = unpack(text);
  return {static_cast<ErrorKind>(std::stoi(parts.at(0))), std::stoi(parts.at(1)), parts.at(2),
          parts.at(3)};
}

}  // namespace longspan::comm
