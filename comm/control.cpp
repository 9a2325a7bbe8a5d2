// The control plane over a mailbox. A letter's first byte says what it is:
//     g step text      this rank's part of a gather
//     w waited step    my deadline passed here; I still run (the roll call)
//     f failure        the communicator has ended, and why
#include "comm/control.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <deque>

#include "comm/wire.hpp"

namespace longspan::comm {
namespace {

constexpr const char* kSameOrder = "every rank must make the same calls in the same order.";

std::string seconds(milliseconds time) { return fmt::format("{:g} s", time.count() / 1000.0); }

class MailControl final : public Control {
 public:
  MailControl(std::unique_ptr<Mailbox> mailbox, milliseconds deadline)
      : Control(deadline), mail_(std::move(mailbox)), peers_(mail_->size()) {}

  ~MailControl() override {
    if (fate().failed()) mail_->abandon();
    flush();
  }

  void flush() noexcept override { mail_->flush(fate().failed() ? milliseconds(200) : deadline()); }

  int rank() const override { return mail_->rank(); }
  int size() const override { return mail_->size(); }
  milliseconds patience() const override { return deadline() - grace(); }

  std::vector<std::string> gather(const std::string& mine, const std::string& step) override {
    fate().check();
    post_all('g', pack(step, mine));
    std::vector<std::string> texts(size());
    texts[rank()] = mine;
    Patience patient(patience());
    for (int missing = size() - 1; missing > 0;) {
      take();
      for (int p = 0; p < size(); ++p) {
        if (p == rank() || peers_[p].counted || peers_[p].gathered.empty()) continue;
        texts[p] = open(p, step);
        --missing;
        patient.progress();
      }
      if (missing == 0) break;
      fate().check();
      for (int p = 0; p < size(); ++p)
        if (peers_[p].gone && !peers_[p].counted) fail(departure(p, step));
      listen(step.c_str(), patient.waited());
      if (patient.over()) timed_out(step.c_str(), patient.waited());
      patient.pause();
    }
    for (Peer& peer : peers_) peer.counted = false;
    return texts;
  }

  void check(const char* step, milliseconds waited) override {
    const auto now = Patience::Clock::now();
    if (now - looked_ < std::chrono::microseconds(100)) return fate().check();
    looked_ = now;
    take();
    fate().check();
    for (int p = 0; p < size(); ++p)
      if (peers_[p].gone && !peers_[p].left) fail(departure(p, step));
    listen(step, waited);
  }

  [[noreturn]] void timed_out(const char* step, milliseconds waited) override {
    peers_[rank()].waits = Waits{step, waited};
    post_all('w', pack(std::to_string(waited.count()), std::string(step)));
    Patience patient(grace());
    while (!patient.over() && count_silent() > 0) {
      take();
      fate().check();
      patient.pause();
    }
    fail(verdict(step));
  }

  void tell(const Failure& failure) noexcept override try {
    if (fate().failed()) return;
    fate().note(failure);
    post_all('f', to_text(failure));
    mail_->flush(milliseconds(200));
  } catch (...) {
    fate().note(failure);  // a peer that cannot be told meets its own deadline
  }

 private:
  struct Waits {
    std::string step;
    milliseconds waited;
  };
  struct Peer {
    std::deque<std::string> gathered;  // letters of gathers that have not been opened
    bool counted = false;              // in the gather that runs now
    bool gone = false;
    bool left = false;  // gone, but it said so
    std::optional<Waits> waits;
  };

  milliseconds grace() const {
    return std::clamp(deadline() / 4, milliseconds(1), milliseconds(5000));
  }

  void post_all(char kind, const std::string& body) {
    std::string text(1, kind);
    text += body;
    for (int p = 0; p < size(); ++p)
      if (p != rank() && !peers_[p].gone) mail_->post(p, text);
  }

  void take() {
    while (auto letter = mail_->next()) {
      Peer& peer = peers_[letter->from];
      if (letter->kind != Mailbox::Letter::text) {
        peer.gone = true;
        peer.left = letter->kind == Mailbox::Letter::left;
        continue;
      }
      const std::string body = letter->body.substr(1);
      switch (letter->body.front()) {
        case 'g':
          peer.gathered.push_back(body);
          break;
        case 'w': {
          const auto parts = unpack(body);
          peer.waits = Waits{parts.at(1), milliseconds(std::stoll(parts.at(0)))};
          break;
        }
        case 'f':
          fate().note(failure_from(body));
          break;
      }
    }
  }

  /// The roll is called by whoever is first; everyone who hears it answers.
  void listen(const char* step, milliseconds waited) {
    for (int p = 0; p < size(); ++p)
      if (p != rank() && peers_[p].waits) timed_out(step, waited);
  }

  std::string open(int p, const std::string& step) {
    const auto parts = unpack(peers_[p].gathered.front());
    peers_[p].gathered.pop_front();
    peers_[p].counted = true;
    if (parts.at(0) != step)
      fail({ErrorKind::rank_failure, p, step,
            fmt::format("Rank {} came to '{}' while rank {} was at '{}': {}", p, parts.at(0),
                        rank(), step, kSameOrder)});
    return parts.at(1);
  }

  Failure departure(int p, const std::string& step) const {
    return {ErrorKind::rank_failure, p, step,
            fmt::format("Rank {} {} before '{}' was done. Its own output says why.", p,
                        peers_[p].left ? "left" : "died", step)};
  }

  int count_silent() const {
    return static_cast<int>(std::count_if(
        peers_.begin(), peers_.end(), [](const Peer& peer) { return !peer.waits && !peer.gone; }));
  }

  /// Who is to blame, from what the roll call heard. Every rank that heard the same says the same.
  Failure verdict(const std::string& step) const {
    const auto find = [&](auto wrong) {
      const auto peer = std::find_if(peers_.begin(), peers_.end(), wrong);
      return peer == peers_.end() ? -1 : static_cast<int>(peer - peers_.begin());
    };
    const auto late = [&](int p, const std::string& how) {
      return Failure{ErrorKind::timeout, p, step,
                     fmt::format("Rank {} {}. It may be stopped, stuck or much slower; "
                                 "LONGSPAN_DEADLINE_S sets the deadline.",
                                 p, how)};
    };

    if (const int p = find([](const Peer& peer) { return peer.gone && !peer.waits; }); p >= 0)
      return departure(p, step);
    if (const int p = find([](const Peer& peer) { return !peer.waits; }); p >= 0) {
      std::vector<int> others;
      for (int other = p + 1; other < size(); ++other)
        if (!peers_[other].waits) others.push_back(other);
      return late(
          p,
          fmt::format(
              "did not come to '{}' within the deadline of {}{}", step, seconds(deadline()),
              others.empty() ? "" : fmt::format(" (nor did ranks {})", fmt::join(others, ", "))));
    }
    const std::string& usual = usual_step();
    if (const int p = find([&](const Peer& peer) { return peer.waits->step != usual; }); p >= 0)
      return {ErrorKind::rank_failure, p, step,
              fmt::format("Rank {} waits at '{}' while others wait at '{}': {}", p,
                          peers_[p].waits->step, usual, kSameOrder)};
    const auto [last, first] = std::minmax_element(
        peers_.begin(), peers_.end(),
        [](const Peer& a, const Peer& b) { return a.waits->waited < b.waits->waited; });
    if (last->waits->waited < first->waits->waited / 2)
      return late(static_cast<int>(last - peers_.begin()),
                  fmt::format("came to '{}' too late: rank {} had waited for {}", step,
                              first - peers_.begin(), seconds(first->waits->waited)));
    return {ErrorKind::timeout, -1, step,
            fmt::format("'{}' was not done within the deadline of {}, although every rank answers: "
                        "the exchange itself does not finish.",
                        step, seconds(deadline()))};
  }

  /// Where most ranks wait; of equals the lowest rank's.
  const std::string& usual_step() const {
    const auto votes = [&](const Peer& candidate) {
      return std::count_if(peers_.begin(), peers_.end(), [&](const Peer& peer) {
        return peer.waits->step == candidate.waits->step;
      });
    };
    return std::max_element(peers_.begin(), peers_.end(),
                            [&](const Peer& a, const Peer& b) { return votes(a) < votes(b); })
        ->waits->step;
  }

  std::unique_ptr<Mailbox> mail_;
  std::vector<Peer> peers_;
  Patience::Clock::time_point looked_{};
};

class SelfControl final : public Control {
 public:
  using Control::Control;
  int rank() const override { return 0; }
  int size() const override { return 1; }
  std::vector<std::string> gather(const std::string& mine, const std::string&) override {
    fate().check();
    return {mine};
  }
  void check(const char*, milliseconds) override { fate().check(); }
  [[noreturn]] void timed_out(const char* step, milliseconds) override {
    fate().fail({ErrorKind::timeout, 0, step,
                 fmt::format("'{}' was not done within the deadline of {}; LONGSPAN_DEADLINE_S "
                             "sets it.",
                             step, seconds(deadline()))});
  }
  void tell(const Failure& failure) noexcept override { fate().note(failure); }
};

}  // namespace

Failure gave_up(int rank, const std::string& why) {
  return {ErrorKind::rank_failure, rank, "", fmt::format("Rank {} gave up: {}", rank, why)};
}

std::unique_ptr<Control> self_control(milliseconds deadline) {
  return std::make_unique<SelfControl>(deadline);
}

std::unique_ptr<Control> mail_control(std::unique_ptr<Mailbox> mailbox, milliseconds deadline) {
  return std::make_unique<MailControl>(std::move(mailbox), deadline);
}

}  // namespace longspan::comm
