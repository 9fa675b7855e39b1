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

LineFile::LineFile(std::string path)
    : path_(std::move(path)),
      fd_(open(path_.c_str(), O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0666)) {
  if (!fd_.valid()) throw SystemError(format("cannot write {}", path_), errno);
}

void LineFile::write(std::string_view line) {
  if (!fd_.valid()) return;
  std::string text;
  if (torn_) text += '\n';
  text.append(line) += '\n';
  for (std::string_view rest = text; !rest.empty();) {
    const ssize_t count = ::write(fd_.get(), rest.data(), rest.size());
    if (count < 0 && errno == EINTR) continue;
    if (count > 0) {
      rest.remove_prefix(static_cast<size_t>(count));
      torn_ = !rest.empty();
      continue;
    }
    const int error = errno;
    if (!failed_) {
      failed_ = true;
      log::warn(format("cannot write {}: {}; what belongs there is lost until it can be written",
                       path_, std::generic_category().message(error)));
    }
    return;
  }
  failed_ = false;
}

}  // namespace lockstep::io
