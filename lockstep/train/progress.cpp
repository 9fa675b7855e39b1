// SPDX-License-Identifier: Apache-2.0
#include "lockstep/train/progress.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdlib>
#include <string_view>

#include "lockstep/core/format.h"
#include "lockstep/core/log.h"
#include "lockstep/flight/recorder.h"

namespace lockstep::train {
namespace {

constexpr int kMinimalBar = 10, kMaximalBar = 40;

void write_out(std::string_view text) {
  while (!text.empty()) {
    const ssize_t count = write(STDOUT_FILENO, text.data(), text.size());
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) return;
    text.remove_prefix(static_cast<size_t>(count));
  }
}

int terminal_width() {
  winsize size{};
  if (ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) != 0 || size.ws_col == 0) return 80;
  return size.ws_col;
}

bool is_terminal() {
  const char* const type = std::getenv("TERM");
  // mpirun gives rank 0 a terminal that is none: what is drawn there ends up in files.
  if (std::getenv("OMPI_COMM_WORLD_SIZE") != nullptr) return false;
  return isatty(STDOUT_FILENO) == 1 && type != nullptr && std::string_view(type) != "dumb";
}

}  // namespace

std::string short_number(double value) {
  for (const auto& [unit, name] : {std::pair{1e9, "G"}, {1e6, "M"}, {1e3, "k"}}) {
    if (value < unit) continue;
    const double scaled = value / unit;
    return format("{:.{}f}{}", scaled, scaled < 9.995 ? 2 : scaled < 99.95 ? 1 : 0, name);
  }
  return format("{:.0f}", value);
}

std::string short_bytes(int64_t bytes) {
  const auto value = static_cast<double>(bytes);
  if (bytes >= int64_t{1} << 30) return format("{:.1f} GB", value / (1 << 30));
  if (bytes >= int64_t{1} << 20) return format("{:.0f} MB", value / (1 << 20));
  return format("{:.0f} kB", value / (1 << 10));
}

std::string short_time(double seconds) {
  const auto whole = static_cast<int64_t>(std::lround(std::max(seconds, 0.0)));
  if (whole < 60) return format("{}s", whole);
  if (whole < 3600) return format("{}m{:02}s", whole / 60, whole % 60);
  return format("{}h{:02}m", whole / 3600, whole / 60 % 60);
}

Progress::Progress(bool speaks, int64_t first_step, int64_t total_steps, int64_t log_every)
    : speaks_(speaks),
      terminal_(speaks && is_terminal()),
      first_step_(first_step),
      total_steps_(total_steps),
      log_every_(std::max<int64_t>(log_every, 1)),
      start_(Clock::now()) {}

Progress::~Progress() { clear_bar(); }

void Progress::line(const std::string& text) {
  if (!speaks_) return;
  clear_bar();
  write_out(text + "\n");
  log::copy_line(text);
}

void Progress::step(const StepMetrics& metrics, const std::vector<flight::SlowRank>& slow) {
  if (!speaks_) return;
  if (std::isfinite(metrics.loss)) {
    const bool first = recent_loss_ == 0;
    recent_loss_ = first ? metrics.loss : 0.9 * recent_loss_ + 0.1 * metrics.loss;
    older_loss_ = first ? metrics.loss : 0.98 * older_loss_ + 0.02 * metrics.loss;
  }
  say_slow(metrics.step, slow);
  if (metrics.step % log_every_ == 0 || metrics.step == first_step_ + 1 ||
      metrics.step == total_steps_) {
    const auto width = std::to_string(total_steps_).size();
    line(
        format("step {:>{}}/{}  loss {:.4f}  grad {:.3f}  lr {:.2e}  {:>5} tok/s  {:>4.0f} ms  {}  "
               "left {}{}",
               metrics.step, width, total_steps_, metrics.loss, metrics.grad_norm, metrics.lr,
               short_number(metrics.tokens_per_s), metrics.step_ms, short_bytes(metrics.peak_bytes),
               short_time(seconds_left(metrics.step)),
               !metrics.skipped                   ? ""
               : std::isfinite(metrics.grad_norm) ? "  skipped: loss spike"
                                                  : "  skipped: not finite"));
  }
  if (terminal_) draw_bar(metrics, slow);
}

void Progress::pause() { paused_at_ = Clock::now(); }

void Progress::resume() { paused_seconds_ += seconds_since(paused_at_); }

double Progress::seconds_left(int64_t step) const {
  const double spent = seconds_since(start_) - paused_seconds_;
  return spent / static_cast<double>(std::max<int64_t>(step - first_step_, 1)) *
         static_cast<double>(total_steps_ - step);
}

void Progress::say_slow(int64_t step, const std::vector<flight::SlowRank>& slow) {
  std::set<int> now;
  for (const flight::SlowRank& rank : slow) {
    now.insert(rank.rank);
    if (slow_.contains(rank.rank) || flight::is_watched()) continue;
    line(
        format("step {}: rank {} is slow: it computed for {:.2f} s, the other ranks for {:.2f} s "
               "(median), and they wait for it",
               step, rank.rank, static_cast<double>(rank.busy_ns) / 1e9,
               static_cast<double>(rank.usual_ns) / 1e9));
  }
  slow_ = std::move(now);
}

// What does not fit into the line is left out, the least important first.
void Progress::draw_bar(const StepMetrics& metrics, const std::vector<flight::SlowRank>& slow) {
  const int64_t step = metrics.step;
  const double done = static_cast<double>(step) / static_cast<double>(total_steps_);
  const int width = terminal_width() - 1;
  std::string words = format("{:3.0f}%  step {}/{}  left {}", 100 * done, step, total_steps_,
                             short_time(seconds_left(step)));
  std::vector<std::string> more;
  for (const flight::SlowRank& rank : slow)
    more.push_back(format("slow: rank {} ({:.1f}x)", rank.rank, rank.ratio()));
  const double change = (recent_loss_ - older_loss_) / std::max(1e-12, std::abs(older_loss_));
  more.push_back(format("loss {:.4f} {}", metrics.loss,
                        change < -0.002  ? "falling"
                        : change > 0.002 ? "rising"
                                         : "steady"));
  more.push_back(format("{} tok/s", short_number(metrics.tokens_per_s)));
  more.push_back(short_bytes(metrics.peak_bytes));
  for (const std::string& word : more) {
    if (static_cast<int>(words.size() + 2 + word.size()) + kMinimalBar + 3 <= width)
      words += "  " + word;
  }
  std::string text = words;
  const int room = width - static_cast<int>(words.size()) - 3;
  if (room >= kMinimalBar) {
    const int length = std::min(room, kMaximalBar), filled = static_cast<int>(done * length);
    text = "[" + std::string(static_cast<size_t>(filled), '#') +
           std::string(static_cast<size_t>(length - filled), '.') + "] " + words;
  }
  text.resize(std::min(text.size(), static_cast<size_t>(std::max(width, 0))));
  write_out("\r\x1b[K" + text);
  bar_drawn_ = true;
}

void Progress::clear_bar() {
  if (bar_drawn_) write_out("\r\x1b[K");
  bar_drawn_ = false;
}

}  // namespace lockstep::train
