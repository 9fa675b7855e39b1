// SPDX-License-Identifier: Apache-2.0
#include "lockstep/train/progress.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <cstdlib>
#include <sstream>
#include <string>

#include "lockstep/core/fd.h"

namespace lockstep::train {
namespace {

using testing::HasSubstr;
using testing::Not;

// Puts the other end of a terminal of this width in the place of stdout while it lives.
class Terminal {
 public:
  explicit Terminal(int columns) : stdout_(dup(STDOUT_FILENO)) {
    master_ = Fd(posix_openpt(O_RDWR | O_NOCTTY));
    grantpt(master_.get());
    unlockpt(master_.get());
    slave_ = Fd(open(ptsname(master_.get()), O_RDWR | O_NOCTTY));
    winsize size{};
    size.ws_row = 24;
    size.ws_col = static_cast<unsigned short>(columns);
    ioctl(slave_.get(), TIOCSWINSZ, &size);
    fcntl(master_.get(), F_SETFL, O_NONBLOCK);
    dup2(slave_.get(), STDOUT_FILENO);
    setenv("TERM", "xterm", 1);
  }
  ~Terminal() { dup2(stdout_.get(), STDOUT_FILENO); }

  std::string text() {
    std::string all;
    char buffer[4096];
    for (ssize_t n = 0; (n = read(master_.get(), buffer, sizeof(buffer))) > 0;) {
      all.append(buffer, static_cast<size_t>(n));
    }
    return all;
  }

 private:
  Fd stdout_, master_, slave_;
};

void run_steps(Progress& progress) {
  for (int64_t step = 1; step <= 4; ++step) {
    progress.step({.step = step, .loss = 2.5, .grad_norm = 1, .lr = 1e-3, .peak_bytes = 5 << 20});
  }
}

// What is drawn again and again must never be wider than the terminal: it would leave its lines
// behind.
TEST(Progress, TheBarFitsTheTerminal) {
  for (const int columns : {100, 40, 12, 1}) {
    Terminal terminal(columns);
    {
      Progress progress(true, 0, 4, 100);
      run_steps(progress);
    }
    const std::string text = terminal.text();
    EXPECT_THAT(text, HasSubstr("\r\x1b[K"));
    EXPECT_EQ(text.find('#') != std::string::npos, columns >= 40) << columns;
    std::istringstream parts(text);
    for (std::string part; std::getline(parts, part, '\r');) {
      if (!part.starts_with("\x1b[K") || part.find("loss") != std::string::npos) continue;
      EXPECT_LT(static_cast<int>(part.size()) - 3, columns) << part;
    }
  }
}

TEST(Progress, WithoutATerminalThereAreOnlyLines) {
  testing::internal::CaptureStdout();
  {
    Progress progress(true, 0, 4, 2);
    run_steps(progress);
    progress.line("done");
  }
  const std::string text = testing::internal::GetCapturedStdout();
  EXPECT_THAT(text, Not(HasSubstr("\r")));
  EXPECT_THAT(text, HasSubstr("step 1/4  loss 2.5000"));
  EXPECT_THAT(text, Not(HasSubstr("step 3/4")));
  EXPECT_THAT(text, HasSubstr("done\n"));
}

TEST(Progress, OneRankSpeaks) {
  testing::internal::CaptureStdout();
  Progress progress(false, 0, 4, 1);
  run_steps(progress);
  EXPECT_EQ(testing::internal::GetCapturedStdout(), "");
}

TEST(Progress, ShortNumbers) {
  EXPECT_EQ(short_number(999), "999");
  EXPECT_EQ(short_number(12345), "12.3k");
  EXPECT_EQ(short_number(842000), "842k");
  EXPECT_EQ(short_number(1.5e9), "1.50G");
  EXPECT_EQ(short_bytes(int64_t{5} << 20), "5 MB");
  EXPECT_EQ(short_bytes(int64_t{3} << 30), "3.0 GB");
  EXPECT_EQ(short_time(59), "59s");
  EXPECT_EQ(short_time(372), "6m12s");
  EXPECT_EQ(short_time(11100), "3h05m");
}

}  // namespace
}  // namespace lockstep::train
