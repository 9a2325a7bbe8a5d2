#include "comm/tcp/hub.hpp"

#include <fmt/format.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <list>
#include <optional>

#include "comm/control/patience.hpp"
#include "comm/control/threads.hpp"
#include "longspan/error.hpp"

namespace longspan::comm {
namespace {

using Clock = Patience::Clock;

/// What the thread works on.
class Office {
 public:
  explicit Office(const Hello& ours) : ours_(ours), ranks_(ours.size), unseated_(ours.size) {}

  /// Rank 0, which need not introduce itself.
  void admit_own(Fd fd) {
    Guest& guest = guests_.emplace_back(Frames(std::move(fd), kMostText));
    guest.rank = 0;
    seat(guest);
  }

  void admit(Fd fd) {
    const auto unknown = [](const Guest& guest) { return !guest.is_known(); };
    if (std::count_if(guests_.begin(), guests_.end(), unknown) >= unseated_ + Hub::kStrangers)
      // The oldest: a rank that says hello at once does not stay here. A welcomed rank counts
      // itself as one of the job, and is never sent away to make room.
      drop(std::find_if(guests_.begin(), guests_.end(), unknown));
    guests_.emplace_back(Frames(std::move(fd), kMostHello));
  }

  /// Moves all that can move now. `closing`: rank 0 has released the hub, and a welcomed rank that
  /// does not take its seat must not keep this thread.
  void serve(bool closing) {
    for (auto guest = guests_.begin(); guest != guests_.end();) {
      guest->frames.read();
      listen(*guest);
      const bool may_stay = guest->state == Guest::seated || (guest->is_known() && !closing);
      const bool over = !may_stay && Clock::now() - guest->since > Hub::kStay;
      guest = guest->frames.open() && !over ? std::next(guest) : drop(guest);
    }
    for (Guest& guest : guests_) {
      guest.frames.write();
      if (guest.state == Guest::refused && !guest.frames.wants_to_write()) guest.frames.finish();
    }
  }

  void poll(std::vector<pollfd>& polled) const {
    for (const Guest& guest : guests_)
      polled.push_back({guest.frames.fd(),
                        static_cast<short>(POLLIN | (guest.frames.wants_to_write() ? POLLOUT : 0)),
                        0});
  }

  bool has_ranks() const {
    return std::any_of(ranks_.begin(), ranks_.end(), [](const Rank& rank) { return rank.guest; });
  }

 private:
  struct Guest {
    explicit Guest(Frames all) : frames(std::move(all)) {}
    Frames frames;
    int rank = -1;
    enum State { stranger, welcomed, seated, refused } state = stranger;
    bool left = false;
    Clock::time_point since = Clock::now();
    bool is_known() const { return state == welcomed || state == seated; }
  };
  using Guests = std::list<Guest>;
  struct Rank {
    Guest* guest = nullptr;   // welcomed or seated
    std::vector<Frame> kept;  // for a rank that has no seat yet
    bool gone = false;
  };

  void deliver(int to, const Frame& frame) {
    Rank& rank = ranks_[to];
    if (rank.guest && rank.guest->state == Guest::seated)
      rank.guest->frames.push(frame);
    else if (!rank.gone)
      rank.kept.push_back(frame);
  }

  /// Handles what came. A stranger that hung up after its hello gets no answer.
  void listen(Guest& guest) {
    if (guest.state == Guest::stranger && !guest.frames.open()) return;
    while (guest.state != Guest::refused) {
      const auto frame = guest.frames.next();
      if (!frame) return;
      if (!handle(guest, *frame)) return guest.frames.close();
    }
    guest.frames.discard();
  }

  /// False for a frame that no rank sends; the only answer is the end of the connection.
  bool handle(Guest& guest, const Frame& frame) {
    switch (guest.state) {
      case Guest::stranger:
        return frame.kind == Frame::hello && greet(guest, frame.body);
      case Guest::welcomed:
        if (frame.kind == Frame::seated) seat(guest);
        return frame.kind == Frame::seated;
      case Guest::seated:
        if (frame.kind == Frame::left) {
          guest.left = true;
          return true;
        }
        if (frame.kind != Frame::text || frame.peer >= ranks_.size()) return false;
        deliver(static_cast<int>(frame.peer),
                {Frame::text, static_cast<std::uint32_t>(guest.rank), frame.body});
        return true;
      default:
        return false;
    }
  }

  bool greet(Guest& guest, const std::string& body) {
    Hello hello;
    try {
      hello = hello_from(body);
    } catch (const Error&) {
      return false;
    }
    if (const auto why = objection(ours_, hello)) return refuse(guest, *why);
    Rank& rank = ranks_[hello.rank];
    if (rank.gone)  // perhaps for the next communicator, whose rank 0 is still in this one
      return refuse(
          guest,
          fmt::format("Rank {} was here and has left, and a rank cannot come back.", hello.rank),
          kComeLater);
    if (rank.guest && rank.guest->state == Guest::seated)
      return refuse(
          guest, fmt::format("Rank {} is here already: two processes have that rank.", hello.rank));
    // A rank that has not read its welcome may have given up that connection.
    if (rank.guest)
      refuse(*rank.guest, fmt::format("Rank {} came again on another connection.", hello.rank));
    guest.rank = hello.rank;
    guest.state = Guest::welcomed;
    rank.guest = &guest;
    guest.frames.push({Frame::welcome, static_cast<std::uint32_t>(hello.rank)});
    return true;
  }

  void seat(Guest& guest) {
    guest.state = Guest::seated;
    guest.frames.take_up_to(kMostText);
    --unseated_;
    Rank& rank = ranks_[guest.rank];
    rank.guest = &guest;
    for (const Frame& frame : rank.kept) guest.frames.push(frame);
    rank.kept.clear();
  }

  bool refuse(Guest& guest, const std::string& why, std::uint32_t hint = 0) {
    if (guest.rank >= 0) ranks_[guest.rank].guest = nullptr;
    guest.rank = -1;
    guest.state = Guest::refused;
    guest.since = Clock::now();
    guest.frames.push({Frame::refused, hint, why});
    return true;
  }

  Guests::iterator drop(Guests::iterator guest) {
    const int rank = guest->rank;
    const bool seated = guest->state == Guest::seated, left = guest->left;
    guest = guests_.erase(guest);
    if (rank < 0) return guest;
    ranks_[rank].guest = nullptr;
    ranks_[rank].gone = seated;
    if (seated)
      for (int r = 0; r < static_cast<int>(ranks_.size()); ++r)
        deliver(r, {left ? Frame::left : Frame::died, static_cast<std::uint32_t>(rank)});
    return guest;
  }

  Hello ours_;
  Guests guests_;
  std::vector<Rank> ranks_;
  int unseated_;  // ranks without a seat
};

/// Accepts waiting connections, but not all at once: those let in are served before so many others
/// come that they would have to make room.
void open_doors(const std::vector<Fd>& listeners, Office& office) {
  const int most =
      std::max(1, Hub::kStrangers / static_cast<int>(std::max<std::size_t>(listeners.size(), 1)));
  for (const Fd& listener : listeners)
    for (int came = 0; came < most; ++came) {
      Fd guest(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
      if (!guest) {
        const bool none = errno == EAGAIN || errno == EWOULDBLOCK || errno == ECONNABORTED;
        // Perhaps out of file descriptors: a waiting connection must not keep this thread busy.
        if (!none) std::this_thread::sleep_for(milliseconds(20));
        break;
      }
      office.admit(std::move(guest));
    }
}

/// How long rank 0 waits for the others when it releases the hub.
constexpr milliseconds kMoment{2000};

}  // namespace

/// Hubs that still relay for the ranks of a communicator that rank 0 has released. If the process
/// ended at once, the messages of the others would be lost.
class Hub::Lingering {
 public:
  static void add(std::shared_ptr<Shared> hub) {
    static Lingering all;
    const std::lock_guard lock(all.mutex_);
    std::erase_if(all.hubs_, [](const auto& one) { return one->wait(milliseconds(0)); });
    all.hubs_.push_back(std::move(hub));
  }
  ~Lingering() {
    for (const auto& hub : hubs_)
      if (hub->process == ::getpid()) hub->wait(milliseconds(hub->linger_ms + 1000));
  }

 private:
  std::mutex mutex_;
  std::vector<std::shared_ptr<Shared>> hubs_;
};

bool Hub::Shared::wait(milliseconds limit) {
  std::unique_lock lock(mutex);
  return changed.wait_for(lock, limit, [this] { return ended; });
}

Hub::Hub(std::vector<Fd> listeners, const Hello& ours) : shared_(std::make_shared<Shared>()) {
  int ends[2];
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0)
    throw BackendError(fmt::format("socketpair failed: {}.", std::strerror(errno)));
  own_ = Fd(ends[0]);
  auto work = [shared = shared_, ours, listeners = std::move(listeners),
               first = Fd(ends[1])]() mutable {
    std::string trouble;
    try {
      run(*shared, std::move(listeners), std::move(first), ours);
    } catch (const std::exception& error) {  // no memory: the end of all connections tells it
      trouble.assign(error.what(), std::min<std::size_t>(std::strlen(error.what()), 15));
    }
    const std::lock_guard lock(shared->mutex);
    shared->trouble = std::move(trouble);
    shared->ended = true;
    shared->changed.notify_all();
  };
  start_thread("messages between ranks", std::move(work)).detach();
}

Hub::~Hub() {
  if (shared_->process != ::getpid()) return;
  shared_->closing = true;
  if (shared_->wait(kMoment)) return;
  try {
    Lingering::add(shared_);
  } catch (...) {  // no memory to keep it: then the end of the process does not wait
  }
}

std::string Hub::trouble() const {
  const std::lock_guard lock(shared_->mutex);
  return shared_->trouble;
}

void Hub::run(Shared& shared, std::vector<Fd> listeners, Fd first, const Hello& ours) {
  Office office(ours);
  office.admit_own(std::move(first));

  std::optional<Clock::time_point> closing_since;
  std::vector<pollfd> polled;
  for (;;) {
    polled.clear();
    for (const Fd& listener : listeners) polled.push_back({listener.get(), POLLIN, 0});
    office.poll(polled);
    ::poll(polled.data(), polled.size(), 20);

    open_doors(listeners, office);
    office.serve(shared.closing);

    if (!shared.closing) continue;
    const auto now = Clock::now();
    if (!closing_since) closing_since = now;
    // Rank 0 may want the port for the next communicator.
    if (now - *closing_since > kMoment / 2) listeners.clear();
    if (!office.has_ranks() || now - *closing_since >= milliseconds(shared.linger_ms)) return;
  }
}

}  // namespace longspan::comm
