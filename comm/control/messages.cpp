#include "comm/control/messages.hpp"

#include <limits>

#include "comm/control/wire.hpp"

namespace longspan::comm {
namespace {

/// More milliseconds or runs than any message has.
constexpr long long kMostNumber = 1'000'000'000'000;

std::uint32_t number32(const std::string& text, long long low) {
  return static_cast<std::uint32_t>(
      number_from(text, low, std::numeric_limits<std::uint32_t>::max()));
}

int int_from(const std::string& text) {
  return static_cast<int>(
      number_from(text, std::numeric_limits<int>::min(), std::numeric_limits<int>::max()));
}

std::string of_kind(char kind, const std::string& fields = {}) {
  std::string text(1, kind);
  text += fields;
  return text;
}

struct Encoder {
  std::string operator()(const GatherPart& part) const {
    return of_kind('g', pack(part.step, part.text));
  }
  std::string operator()(const WaitNotice& notice) const {
    return of_kind('w',
                   pack(std::to_string(notice.waited.count()), notice.step,
                        std::to_string(notice.run.place), std::to_string(notice.run.name.layer),
                        std::to_string(notice.run.name.run), pack_all(notice.description)));
  }
  std::string operator()(const Refusal& refusal) const {
    return of_kind(
        'r', pack(std::to_string(refusal.place), refusal.reason, pack_all(refusal.description)));
  }
  std::string operator()(const RefusalWithdrawn&) const { return of_kind('r'); }
  std::string operator()(const Failure& failure) const { return of_kind('f', to_text(failure)); }
  std::string operator()(const Echo&) const { return of_kind('e'); }
  std::string operator()(const GroupMessage& message) const {
    return of_kind('s', pack(std::to_string(message.number), message.body));
  }
};

GatherPart gather_part(const std::string& fields) {
  auto parts = unpack(fields, 2);
  return {std::move(parts[0]), std::move(parts[1])};
}

WaitNotice wait_notice(const std::string& fields) {
  const auto parts = unpack(fields, 6);
  return {parts[1],
          milliseconds(number_from(parts[0], 0, kMostNumber)),
          {static_cast<std::uint64_t>(number_from(parts[2], 0, kMostNumber)),
           {number32(parts[3], 0), number32(parts[4], 0)}},
          unpack(parts[5])};
}

Refusal refusal_from(const std::string& fields) {
  const auto parts = unpack(fields, 3);
  return {static_cast<std::uint64_t>(number_from(parts[0], 1, kMostNumber)),
          printable(parts[1], 1000), unpack(parts[2])};
}

GroupMessage group_message(const std::string& fields) {
  auto parts = unpack(fields, 2);
  return {number32(parts[0], 1), std::move(parts[1])};
}

}  // namespace

std::string encode(const ControlMessage& message) { return std::visit(Encoder{}, message); }

ControlMessage decode(const std::string& text) {
  if (text.empty()) throw_damage();
  const std::string fields = text.substr(1);
  switch (text.front()) {
    case 'g':
      return gather_part(fields);
    case 'w':
      return wait_notice(fields);
    case 'r':
      if (fields.empty()) return RefusalWithdrawn{};
      return refusal_from(fields);
    case 'f':
      return failure_from(fields);
    case 'e':
      return Echo{};
    case 's':
      return group_message(fields);
    default:
      throw_damage();
  }
}

std::string encode(const SplitRequest& request) {
  return pack(std::to_string(request.color), std::to_string(request.key),
              std::to_string(request.number));
}

SplitRequest decode_split_request(const std::string& text) {
  const auto parts = unpack(text, 3);
  return {int_from(parts[0]), int_from(parts[1]), number32(parts[2], 1)};
}

}  // namespace longspan::comm
