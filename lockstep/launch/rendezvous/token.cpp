// SPDX-License-Identifier: Apache-2.0
#include "lockstep/launch/rendezvous/token.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <string_view>

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/launch/rendezvous/hmac.h"
#include "lockstep/launch/rendezvous/secret.h"
#include "lockstep/launch/rendezvous/wire.h"

namespace lockstep::launch {
namespace {

template <class Bytes>
std::string hexadecimal(const Bytes& bytes) {
  std::string text;
  for (const auto byte : bytes) text += format("{:02x}", static_cast<unsigned char>(byte));
  return text;
}

// From the file's start, whatever its offset is: several readers share the descriptor. One byte
// above the limit is read so that too long a token is seen.
std::string read_start(int fd) {
  std::string bytes(wire::kMaxToken + 1, '\0');
  size_t done = 0;
  while (done < bytes.size()) {
    const ssize_t count =
        pread(fd, bytes.data() + done, bytes.size() - done, static_cast<off_t>(done));
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) throw SystemError("read", errno);
    if (count == 0) break;
    done += static_cast<size_t>(count);
  }
  bytes.resize(done);
  return bytes;
}

}  // namespace

std::string make_token() {
  std::array<unsigned char, 32> random{};
  size_t done = 0;
  while (done < random.size()) {
    const ssize_t count = getrandom(random.data() + done, random.size() - done, 0);
    if (count < 0 && errno != EINTR) throw SystemError("getrandom", errno);
    if (count > 0) done += static_cast<size_t>(count);
  }
  return hexadecimal(random);
}

std::string secret_from_environment() {
  const char* const file = std::getenv("LOCKSTEP_TOKEN_FILE");
  if (file != nullptr && *file != '\0') return token_from_file(file);
  const char* const token = std::getenv("LOCKSTEP_TOKEN");
  return token == nullptr ? "" : token;
}

std::string token_for_job(const std::string& secret, const std::string& job) {
  return hexadecimal(hmac_sha256(secret, "lockstep job " + job));
}

std::string token_from_environment() {
  const char* const number = std::getenv("LOCKSTEP_TOKEN_FD");
  if (number == nullptr || *number == '\0') return secret_from_environment();
  int fd = -1;
  const std::string_view text(number);
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), fd);
  if (error != std::errc() || end != text.data() + text.size() || fd < 0) {
    throw ConfigError(format("environment: LOCKSTEP_TOKEN_FD={} is not a descriptor", text));
  }
  try {
    return read_start(fd);
  } catch (const SystemError& failure) {
    throw ConfigError(
        format("environment: the job's token cannot be read from descriptor LOCKSTEP_TOKEN_FD={}: "
               "{}; a program between "
               "lockstep run and this one may have closed it",
               text, std::strerror(failure.error_number())));
  }
}

std::string token_from_file(const std::string& path) {
  const Fd file(open(path.c_str(), O_RDONLY | O_CLOEXEC));
  struct stat status {};
  if (!file.valid() || fstat(file.get(), &status) != 0) {
    throw ConfigError(format("token file {}: {}", path, std::strerror(errno)));
  }
  if (!S_ISREG(status.st_mode)) throw ConfigError(format("token file {}: not a file", path));
  if ((status.st_mode & 077) != 0) {
    throw ConfigError(format("token file {}: its mode {:04o} lets others read it; chmod 600 it",
                             path, status.st_mode & 0777u));
  }
  std::string token = read_start(file.get());
  token.resize(std::min(token.find_first_of("\r\n"), token.size()));
  if (token.empty() || token.size() > wire::kMaxToken) {
    throw ConfigError(
        format("token file {}: its first line must have 1 to {} bytes", path, wire::kMaxToken));
  }
  return token;
}

Fd token_descriptor(const std::string& token) {
  Fd file(memfd_create("lockstep-token", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!file.valid()) throw SystemError("memfd_create", errno);
  write_full(file, std::as_bytes(std::span(token)), Deadline(kDefaultTimeout));
  if (fcntl(file.get(), F_ADD_SEALS, F_SEAL_WRITE | F_SEAL_GROW | F_SEAL_SHRINK | F_SEAL_SEAL) !=
      0) {
    throw SystemError("memfd seal", errno);
  }
  return file;
}

}  // namespace lockstep::launch
