// SPDX-License-Identifier: Apache-2.0
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <limits>
#include <vector>

#include "lockstep/core/error.h"
#include "lockstep/core/fd.h"
#include "lockstep/core/format.h"
#include "lockstep/data/tokens/token_file.h"
#include "lockstep/data/tokens/token_headers.h"

namespace lockstep::data {
namespace {

constexpr size_t kBufferBytes = size_t{1} << 20;

// A new file next to `target`; removed again unless it is put in the target's place.
class PartFile {
 public:
  explicit PartFile(std::string target) : target_(std::move(target)) {
    // The number may be taken by another writer, or by one that was killed.
    for (int attempt = 0; attempt < 1000 && !file_.valid(); ++attempt) {
      path_ = format("{}.part{}", target_, attempt);
      file_ = Fd(open(path_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666));
      if (!file_.valid() && errno != EEXIST) break;
    }
    if (!file_.valid()) throw SystemError("cannot write " + std::exchange(path_, {}), errno);
  }
  ~PartFile() {
    if (!path_.empty()) unlink(path_.c_str());
  }
  PartFile(const PartFile&) = delete;
  PartFile& operator=(const PartFile&) = delete;

  void append(const void* data, size_t size) {
    const auto* bytes = static_cast<const std::byte*>(data);
    buffer_.insert(buffer_.end(), bytes, bytes + size);
    if (buffer_.size() >= kBufferBytes) flush();
  }

  void overwrite_start(const void* data, size_t size) {
    flush();
    if (pwrite(file_.get(), data, size, 0) != static_cast<ssize_t>(size)) fail("write");
  }

  // Everything is on disk when this returns; the name is still the temporary one.
  void sync() {
    flush();
    if (fsync(file_.get()) != 0) fail("sync");
  }

  void put_in_place() {
    if (rename(path_.c_str(), target_.c_str()) != 0) fail("rename");
    path_.clear();
  }

 private:
  void flush() {
    size_t done = 0;
    while (done < buffer_.size()) {
      const ssize_t count = ::write(file_.get(), buffer_.data() + done, buffer_.size() - done);
      if (count < 0 && errno != EINTR) fail("write");
      if (count > 0) done += static_cast<size_t>(count);
    }
    buffer_.clear();
  }

  [[noreturn]] void fail(const char* what) const {
    throw SystemError(format("cannot {} {} for {}", what, path_, target_), errno);
  }

  std::string target_, path_;
  Fd file_;
  std::vector<std::byte> buffer_;
};

// A rename is on disk when its folder is.
void sync_folder_of(const std::string& path) {
  const size_t slash = path.rfind('/');
  const std::string folder = slash == std::string::npos ? "." : path.substr(0, slash + 1);
  const Fd fd(open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!fd.valid() || fsync(fd.get()) != 0) throw SystemError("cannot sync " + folder, errno);
}

template <class T>
void append(PartFile& file, T value) {
  file.append(&value, sizeof value);
}

}  // namespace

struct TokenFileWriter::State {
  State(const std::string& to, TokenLayout as, int64_t bytes)
      : path(to), layout(as), width(bytes), bin(to) {}

  void write_llmc_header() {
    const LlmcKind kind = width == 2 ? kLlmc16 : kLlmc32;
    int32_t header[kLlmcHeaderBytes / 4] = {kind.magic, kind.version, static_cast<int32_t>(tokens)};
    bin.overwrite_start(header, sizeof header);
  }

  void write_index(PartFile& index) const {
    index.append(kMegatronMagic, sizeof kMegatronMagic);
    append(index, kMegatronVersion);
    append(index, width == 2 ? kMegatronUint16 : kMegatronInt32);
    append(index, static_cast<uint64_t>(lengths.size()));
    append(index, static_cast<uint64_t>(lengths.size() + 1));
    for (const int32_t length : lengths) append(index, length);
    int64_t pointer = 0;
    for (const int32_t length : lengths) {
      append(index, pointer);
      pointer += length * width;
    }
    for (size_t i = 0; i <= lengths.size(); ++i) append(index, static_cast<int64_t>(i));
  }

  std::string path;
  TokenLayout layout;
  int64_t width;
  PartFile bin;
  std::vector<int32_t> lengths;  // of Megatron's documents
  int64_t documents = 0, tokens = 0, document_tokens = 0;
};

TokenFileWriter::TokenFileWriter(const std::string& path, TokenLayout layout, int64_t width) {
  if (!path.ends_with(".bin")) {
    throw ConfigError(format("token file {}: its name must end in .bin", path));
  }
  if (width != 2 && (width != 4 || layout == TokenLayout::nanogpt)) {
    throw ConfigError(format("token file {}: {} bytes a token; {} has {}", path, width,
                             name_of(layout), layout == TokenLayout::nanogpt ? "2" : "2 or 4"));
  }
  struct stat status {};
  if (const std::string index = index_path(path);
      layout != TokenLayout::megatron && stat(index.c_str(), &status) == 0) {
    throw ConfigError(format(
        "token file {}: {} is next to it, so it would be read as Megatron's; remove that, or write "
        "to another name",
        path, index));
  }
  state_ = std::make_unique<State>(path, layout, width);
  if (layout == TokenLayout::llmc) {
    const std::vector<std::byte> room(kLlmcHeaderBytes);
    state_->bin.append(room.data(), room.size());
  }
}

TokenFileWriter::~TokenFileWriter() = default;
TokenFileWriter::TokenFileWriter(TokenFileWriter&&) noexcept = default;
TokenFileWriter& TokenFileWriter::operator=(TokenFileWriter&&) noexcept = default;

void TokenFileWriter::write(std::span<const int32_t> tokens) {
  State& state = *state_;
  const int32_t largest = state.width == 2 ? 65535 : std::numeric_limits<int32_t>::max();
  for (const int32_t token : tokens) {
    if (token < 0 || token > largest) {
      throw ConfigError(format("token file {}: token {} does not fit {} bytes, must be in [0, {}]",
                               state.path, token, state.width, largest));
    }
  }
  // llm.c counts a file's tokens in an int32, Megatron a document's.
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  const auto count = static_cast<int64_t>(tokens.size());
  if (state.layout == TokenLayout::llmc && state.tokens + count > kMost) {
    throw ConfigError(format(
        "token file {}: an llm.c file has at most {} tokens; write several, or use layout megatron",
        state.path, kMost));
  }
  if (state.layout == TokenLayout::megatron && state.document_tokens + count > kMost) {
    throw ConfigError(format("token file {}: a Megatron document has at most {} tokens; cut it",
                             state.path, kMost));
  }
  if (state.width == 4) {
    state.bin.append(tokens.data(), tokens.size_bytes());
  } else {
    const std::vector<uint16_t> narrow(tokens.begin(), tokens.end());
    state.bin.append(narrow.data(), 2 * narrow.size());
  }
  state.tokens += count;
  state.document_tokens += count;
}

void TokenFileWriter::end_document() {
  State& state = *state_;
  if (state.layout == TokenLayout::megatron) {
    state.lengths.push_back(static_cast<int32_t>(state.document_tokens));
  }
  ++state.documents;
  state.document_tokens = 0;
}

void TokenFileWriter::finish() {
  State& state = *state_;
  if (state.document_tokens > 0) end_document();
  if (state.layout == TokenLayout::llmc) state.write_llmc_header();
  state.bin.sync();
  if (state.layout == TokenLayout::megatron) {
    PartFile index(index_path(state.path));
    state.write_index(index);
    index.sync();
    // First the index: a .bin without one would pass for another layout, an index without its .bin
    // for nothing.
    index.put_in_place();
  }
  state.bin.put_in_place();
  sync_folder_of(state.path);
}

int64_t TokenFileWriter::documents() const { return state_->documents; }
int64_t TokenFileWriter::tokens() const { return state_->tokens; }

}  // namespace lockstep::data
