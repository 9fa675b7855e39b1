// SPDX-License-Identifier: Apache-2.0
#include "lockstep/io/line_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/core/log.h"

namespace lockstep::io {

LineFile::LineFile(std::string path) : state_(std::make_unique<State>()) {
  state_->path = std::move(path);
  state_->fd = Fd(open(state_->path.c_str(), O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0666));
  if (!state_->fd.valid()) throw SystemError(format("cannot write {}", state_->path), errno);
}

void LineFile::write(std::string_view line) {
  if (!state_) return;
  std::string text;
  if (state_->torn) text += '\n';
  text.append(line) += '\n';
  for (std::string_view rest = text; !rest.empty();) {
    const ssize_t count = ::write(state_->fd.get(), rest.data(), rest.size());
    if (count < 0 && errno == EINTR) continue;
    if (count > 0) {
      rest.remove_prefix(static_cast<size_t>(count));
      state_->torn = !rest.empty();
      continue;
    }
    const int error = errno;
    // Before the warning, which may be written to this file too.
    if (!state_->failed.exchange(true)) {
      log::warn(format("cannot write {}: {}; what belongs there is lost until it can be written",
                       state_->path, std::generic_category().message(error)));
    }
    return;
  }
  state_->failed = false;
}

}  // namespace lockstep::io
