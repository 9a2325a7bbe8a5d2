#include "comm/control/failure.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <exception>
#include <utility>

#include "comm/control/wire.hpp"

namespace longspan::comm {

std::string seconds(std::chrono::milliseconds time) {
  return fmt::format("{:g} s", time.count() / 1000.0);
}

void throw_failure(const Failure& failure) {
  const char* lost = "The communicator has ended, and there was no memory to keep the reason.";
  const std::string what = failure.what.empty() ? lost : failure.what;
  if (failure.kind == ErrorKind::backend) throw BackendError(what);
  if (failure.kind == ErrorKind::usage) throw UsageError(what);
  throw RankError(failure.kind, failure.rank, failure.step, what);
}

std::string to_text(const Failure& failure) {
  return pack(std::to_string(static_cast<int>(failure.kind)), std::to_string(failure.rank),
              failure.step, failure.what);
}

long long number_from(const std::string& text, long long low, long long high) {
  long long value = 0;
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value);
  if (error != std::errc() || stop != end || value < low || value > high) throw_damage();
  return value;
}

Failure failure_from(const std::string& text) {
  const auto parts = unpack(text, 4);
  const auto kind = number_from(parts[0], static_cast<int>(ErrorKind::internal),
                                static_cast<int>(ErrorKind::backend));
  const auto rank = number_from(parts[1], -1, 1 << 30);
  return {static_cast<ErrorKind>(kind), static_cast<int>(rank), parts[2], parts[3]};
}

void Outcome::note(const Failure& failure) noexcept {
  std::vector<Child> children;
  {
    const std::lock_guard lock(mutex_);
    if (failed_.load(std::memory_order_relaxed)) return;
    first_.kind = failure.kind;
    first_.rank = failure.rank;
    try {
      first_.step = failure.step;
      first_.what = failure.what;
    } catch (const std::exception&) {
      first_.what.clear();
    }
    children.swap(children_);
    failed_.store(true, std::memory_order_release);
  }
  propagate(first_, children);
}

void Outcome::throw_first() {
  if (!thrown_.exchange(true)) throw_failure(first_);
  Failure earlier{first_.kind, first_.rank, first_.step, {}};
  const std::string at = first_.step.empty() ? "" : ", at '" + first_.step + "'";
  if (!first_.what.empty())
    earlier.what = "The communicator had ended before this call" + at + ": " + first_.what +
                   " Make another communicator to go on.";
  throw_failure(earlier);
}

void Outcome::add_child(const std::shared_ptr<Outcome>& child, std::vector<int> members) {
  std::vector<Child> children{{child, std::move(members)}};
  {
    const std::lock_guard lock(mutex_);
    if (!failed_.load(std::memory_order_relaxed)) {
      std::erase_if(children_, [](const Child& one) { return one.outcome.expired(); });
      children_.push_back(std::move(children.front()));
      return;
    }
  }
  propagate(first_, children);
}

void Outcome::propagate(const Failure& failure, const std::vector<Child>& children) noexcept {
  for (const Child& child : children) {
    const std::shared_ptr<Outcome> outcome = child.outcome.lock();
    if (!outcome) continue;
    const auto place = std::find(child.members.begin(), child.members.end(), failure.rank);
    Failure inherited{failure.kind, -1, {}, {}};
    if (place != child.members.end())
      inherited.rank = static_cast<int>(place - child.members.begin());
    try {
      inherited.step = failure.step;
      inherited.what = "The communicator that this one was split from has ended: " + failure.what;
    } catch (const std::exception&) {  // without memory for the text, the end itself
                                       // takes none
    }
    outcome->note(inherited);
  }
}

}  // namespace longspan::comm
