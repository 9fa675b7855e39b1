#include "lockstep/formats/file_record.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <span>
#include <vector>

#include "lockstep/core/error.h"
#include "lockstep/core/fd.h"
#include "lockstep/formats/crc32c.h"

namespace lockstep::formats {

// Not mapped: a disk that fails gives an error here, and a signal there.
FileRecord record_of(const std::string& path) {
  const Fd fd(open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!fd.valid()) throw SystemError("cannot read " + path, errno);
  FileRecord record;
  Crc32c crc;
  std::vector<std::byte> buffer(size_t{1} << 20);
  while (true) {
    const ssize_t count = read(fd.get(), buffer.data(), buffer.size());
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) throw SystemError("cannot read " + path, errno);
    if (count == 0) break;
    crc.update(std::span(buffer).first(static_cast<size_t>(count)));
    record.bytes += static_cast<uint64_t>(count);
  }
  record.crc32c = crc.value();
  return record;
}

}  // namespace lockstep::formats
