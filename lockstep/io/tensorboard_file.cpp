// SPDX-License-Identifier: Apache-2.0
// The field numbers are those of tensorflow/core/util/event.proto and framework/summary.proto.
#include "lockstep/io/tensorboard_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <bit>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <ctime>

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/core/rank_env.h"
#include "lockstep/io/crc32c.h"
#include "lockstep/io/durable.h"

namespace lockstep::io {
namespace {

enum Wire { kVarint = 0, kFixed64 = 1, kLength = 2, kFixed32 = 5 };

template <class T>
void append_fixed(std::string& to, T value) {
  static_assert(std::endian::native == std::endian::little);
  char bytes[sizeof value];
  std::memcpy(bytes, &value, sizeof value);
  to.append(bytes, sizeof value);
}

void append_varint(std::string& to, uint64_t value) {
  for (; value >= 0x80; value >>= 7) to += static_cast<char>(value | 0x80);
  to += static_cast<char>(value);
}

void append_key(std::string& to, int field, Wire wire) {
  append_varint(to, static_cast<uint64_t>(field) << 3 | static_cast<uint64_t>(wire));
}

void append_text(std::string& to, int field, std::string_view text) {
  append_key(to, field, kLength);
  append_varint(to, text.size());
  to += text;
}

std::string event(double time, int64_t step) {
  std::string text;
  append_key(text, 1, kFixed64);
  append_fixed(text, time);
  append_key(text, 2, kVarint);
  append_varint(text, static_cast<uint64_t>(step));
  return text;
}

uint32_t masked_crc(std::string_view text) {
  const uint32_t crc = crc32c(std::as_bytes(std::span(text)));
  return ((crc >> 15) | (crc << 17)) + 0xa282ead8u;
}

}  // namespace

TensorboardFile::TensorboardFile(const std::string& folder) {
  make_folders(folder);
  const auto now = std::time(nullptr);
  for (int again = 0; !fd_.valid(); ++again) {
    const std::string path =
        format("{}/events.out.tfevents.{:010}.{}.{}.{}", folder, now, host_name(), getpid(), again);
    fd_ = Fd(open(path.c_str(), O_WRONLY | O_APPEND | O_CREAT | O_EXCL | O_CLOEXEC, 0666));
    if (!fd_.valid() && errno != EEXIST) throw SystemError(format("cannot write {}", path), errno);
  }
  std::string first = event(static_cast<double>(now), 0);
  append_text(first, 3, "brain.Event:2");
  record(first);
}

// Length, its checksum, the event, its checksum: in one call, so that a killed process leaves whole
// records. On a full disk the rest of the file is lost; training continues.
void TensorboardFile::record(std::string_view event) {
  if (!fd_.valid()) return;
  std::string bytes;
  append_fixed(bytes, static_cast<uint64_t>(event.size()));
  append_fixed(bytes, masked_crc(bytes));
  bytes += event;
  append_fixed(bytes, masked_crc(event));
  ssize_t count = 0;
  do count = ::write(fd_.get(), bytes.data(), bytes.size());
  while (count < 0 && errno == EINTR);
  // Readers stop at a record that is not whole.
  if (count != static_cast<ssize_t>(bytes.size())) fd_.reset();
}

void TensorboardFile::write(int64_t step, double time, std::span<const Scalar> scalars) {
  if (!fd_.valid()) return;
  std::string summary;
  for (const auto& [tag, value] : scalars) {
    if (!std::isfinite(value)) continue;
    std::string entry;
    append_text(entry, 1, tag);
    append_key(entry, 2, kFixed32);
    append_fixed(entry, static_cast<float>(value));
    append_text(summary, 1, entry);
  }
  std::string text = event(time, step);
  append_text(text, 5, summary);
  record(text);
}

}  // namespace lockstep::io
