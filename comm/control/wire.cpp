#include "comm/control/wire.hpp"

#include <charconv>

#include "longspan/error.hpp"

namespace longspan::comm {

void throw_damage() {
  throw Error(ErrorKind::internal,
              "A control message came damaged: is every rank of the same longspan version?");
}

std::vector<std::string> unpack(std::string_view packed) {
  std::vector<std::string> texts;
  while (!packed.empty()) {
    std::size_t length = 0;
    const char* end = packed.data() + packed.size();
    const auto [colon, error] = std::from_chars(packed.data(), end, length);
    if (error != std::errc() || colon == end || *colon != ':' ||
        length > static_cast<std::size_t>(end - colon - 1))
      throw_damage();
    texts.emplace_back(colon + 1, length);
    packed.remove_prefix(static_cast<std::size_t>(colon + 1 - packed.data()) + length);
  }
  return texts;
}

std::vector<std::string> unpack(std::string_view packed, std::size_t count) {
  auto texts = unpack(packed);
  if (texts.size() != count) throw_damage();
  return texts;
}

}  // namespace longspan::comm
