// SPDX-License-Identifier: Apache-2.0
#include "lockstep/data/tokens/token_file.h"

#include <sys/stat.h>

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/data/tokens/token_headers.h"

namespace lockstep::data {
namespace {

using Bytes = std::span<const std::byte>;

// The caller has made sure that the bytes are there.
template <class T>
T load(Bytes bytes, uint64_t at) {
  T value;
  std::memcpy(&value, bytes.data() + at, sizeof(T));
  return value;
}

[[noreturn]] void refuse(const std::string& path, const std::string& why) {
  throw ConfigError(format("token file {}: {}", path, why));
}

// The first bytes, or all where there are fewer.
std::vector<std::byte> start_of(const InputFile& file, uint64_t most) {
  std::vector<std::byte> bytes(std::min(file.size(), most));
  file.read(0, bytes);
  return bytes;
}

// ---- llm.c ----

bool has_llmc_magic(Bytes bytes) {
  if (bytes.size() < 4) return false;
  const auto magic = load<int32_t>(bytes, 0);
  return magic == kLlmc16.magic || magic == kLlmc32.magic || magic == kLlmcEvaluationMagic;
}

TokenType llmc_type(const InputFile& file, Bytes head) {
  const std::string& path = file.path();
  const auto magic = load<int32_t>(head, 0);
  if (magic == kLlmcEvaluationMagic) {
    refuse(path, "is an llm.c evaluation file (magic 20240522), not a stream of tokens");
  }
  if (file.size() < kLlmcHeaderBytes) {
    refuse(path,
           format("has {} bytes, an llm.c header has {}; the file is cut short or is not llm.c's",
                  file.size(), kLlmcHeaderBytes));
  }
  const LlmcKind kind = magic == kLlmc16.magic ? kLlmc16 : kLlmc32;
  if (const auto version = load<int32_t>(head, 4); version != kind.version) {
    refuse(path,
           format("llm.c magic {} with version {}, must be {}", magic, version, kind.version));
  }
  const int64_t count = load<int32_t>(head, 8);
  const int64_t there = static_cast<int64_t>(file.size() - kLlmcHeaderBytes);
  if (count < 0 || there != count * kind.width) {
    refuse(path, format("its llm.c header says {} tokens of {} bytes, but {} bytes follow it; the "
                        "file is cut short or still being written",
                        count, kind.width, there));
  }
  return kind.width == 2 ? TokenType::uint16 : TokenType::uint32;
}

// ---- Megatron ----

TokenType megatron_type(const std::string& path, uint8_t code) {
  switch (code) {
    case 1:
      return TokenType::uint8;
    case 3:
      return TokenType::int16;
    case kMegatronInt32:
      return TokenType::int32;
    case 5:
      return TokenType::int64;
    case kMegatronUint16:
      return TokenType::uint16;
    default:
      refuse(path, format("type {} is not one for token ids (1, 3, 4, 5 or 8)", code));
  }
}

// Numbers of a file that are read one after another.
class Numbers {
 public:
  Numbers(const InputFile& file, uint64_t begin) : file_(file), next_(begin) {}

  template <class T>
  T next() {
    if (at_ + sizeof(T) > bytes_.size()) {
      bytes_.resize(std::min<uint64_t>(kBytes, file_.size() - next_));
      file_.read(next_, bytes_);
      at_ = 0;
    }
    const T value = load<T>(bytes_, at_);
    at_ += sizeof(T);
    next_ += sizeof(T);
    return value;
  }

 private:
  static constexpr uint64_t kBytes = uint64_t{1} << 18;

  const InputFile& file_;
  uint64_t next_;  // the offset in the file of what at_ is in bytes_
  std::vector<std::byte> bytes_;
  size_t at_ = 0;
};

// Sequences must follow one another from the start of .bin to its end, as Megatron writes them.
void check_sequences(const InputFile& index, uint64_t sequences, uint64_t bin_bytes,
                     uint64_t width) {
  const std::string& path = index.path();
  Numbers lengths(index, kMegatronHeaderBytes);
  Numbers pointers(index, kMegatronHeaderBytes + 4 * sequences);
  uint64_t end = 0;
  for (uint64_t i = 0; i < sequences; ++i) {
    const auto length = lengths.next<int32_t>();
    const auto pointer = pointers.next<int64_t>();
    if (length < 0) refuse(path, format("sequence {} has {} tokens", i, length));
    if (pointer < 0 || static_cast<uint64_t>(pointer) != end) {
      refuse(path, format("sequence {} is at byte {}, must follow the one before it at {}", i,
                          pointer, end));
    }
    end += static_cast<uint64_t>(length) * width;
    if (end > bin_bytes) {
      refuse(path, format("sequence {} ends at byte {}, but .bin has {} bytes", i, end, bin_bytes));
    }
  }
  if (end != bin_bytes) {
    refuse(path, format("its sequences end at byte {}, but .bin has {} bytes", end, bin_bytes));
  }
}

void check_documents(const InputFile& index, uint64_t sequences, uint64_t documents) {
  const std::string& path = index.path();
  Numbers borders(index, kMegatronHeaderBytes + 12 * sequences);
  int64_t before = 0;
  for (uint64_t i = 0; i < documents; ++i) {
    const auto border = borders.next<int64_t>();
    if (border < before || (i == 0 && border != 0) || border > static_cast<int64_t>(sequences)) {
      refuse(path, format("document border {} is sequence {}; borders must rise from 0 to {}", i,
                          border, sequences));
    }
    before = border;
  }
  if (documents > 0 && before != static_cast<int64_t>(sequences)) {
    refuse(path, format("the last document ends at sequence {} of {}", before, sequences));
  }
}

TokenType check_index(const InputFile& index, uint64_t bin_bytes) {
  const std::string& path = index.path();
  const auto head = start_of(index, kMegatronHeaderBytes);
  if (head.size() < kMegatronHeaderBytes ||
      std::memcmp(head.data(), kMegatronMagic, sizeof kMegatronMagic) != 0) {
    refuse(path, format("its {} bytes do not begin with Megatron's header of {} bytes (MMIDIDX)",
                        index.size(), kMegatronHeaderBytes));
  }
  if (const auto version = load<uint64_t>(head, 9); version != kMegatronVersion) {
    refuse(path, format("version {}, must be {}", version, kMegatronVersion));
  }
  const TokenType type = megatron_type(path, load<uint8_t>(head, 17));
  const auto sequences = load<uint64_t>(head, 18), documents = load<uint64_t>(head, 26);
  // Divided first: counts from a damaged header would overflow the products.
  if (sequences > index.size() / 12 || documents > index.size() / 8 ||
      index.size() != kMegatronHeaderBytes + 12 * sequences + 8 * documents) {
    refuse(path, format("has {} bytes, its header asks for {} + 12 x {} sequences + 8 x {} borders",
                        index.size(), kMegatronHeaderBytes, sequences, documents));
  }
  check_sequences(index, sequences, bin_bytes, static_cast<uint64_t>(width_of(type)));
  check_documents(index, sequences, documents);
  return type;
}

}  // namespace

const char* name_of(TokenLayout layout) {
  switch (layout) {
    case TokenLayout::llmc:
      return "llm.c";
    case TokenLayout::nanogpt:
      return "nanogpt";
    case TokenLayout::megatron:
      return "megatron";
  }
  throw std::logic_error("lockstep bug: an unknown layout of tokens");
}

TokenLayout token_layout(std::string_view name) {
  for (const auto layout : {TokenLayout::llmc, TokenLayout::nanogpt, TokenLayout::megatron}) {
    if (name == name_of(layout)) return layout;
  }
  throw ConfigError(
      format("token layout '{}' is not known, must be llm.c, nanogpt or megatron", name));
}

std::string index_path(const std::string& path) {
  return (path.ends_with(".bin") ? path.substr(0, path.size() - 4) : path) + ".idx";
}

std::optional<std::vector<int64_t>> document_ends_in(const std::string& path) {
  struct stat status {};
  if (stat(index_path(path).c_str(), &status) != 0) return std::nullopt;
  const InputFile index(index_path(path));
  check_index(index, InputFile(path).size());  // it may be another one than when it was opened
  const auto head = start_of(index, kMegatronHeaderBytes);
  const auto sequences = load<uint64_t>(head, 18), documents = load<uint64_t>(head, 26);
  Numbers lengths(index, kMegatronHeaderBytes);
  Numbers borders(index, kMegatronHeaderBytes + 12 * sequences);
  std::vector<int64_t> ends;
  int64_t sequence = 0, end = 0;
  // Without borders every sequence is a document.
  for (uint64_t i = 0; i < (documents > 0 ? documents : sequences); ++i) {
    const auto last = documents > 0 ? borders.next<int64_t>() : sequence + 1;
    for (; sequence < last; ++sequence) end += lengths.next<int32_t>();
    ends.push_back(end);
  }
  return ends;
}

TokenFile TokenFile::open(const std::string& path) {
  InputFile file(path);
  struct stat status {};
  if (const std::string index = index_path(path); stat(index.c_str(), &status) == 0) {
    const TokenType type = check_index(InputFile(index), file.size());
    return {TokenLayout::megatron, {std::move(file), 0, type}};
  }
  if (const auto head = start_of(file, kLlmcHeaderBytes); has_llmc_magic(head)) {
    const TokenType type = llmc_type(file, head);
    return {TokenLayout::llmc, {std::move(file), kLlmcHeaderBytes, type}};
  }
  if (file.size() % 2 != 0) {
    refuse(path, format("has {} bytes; without a header it must hold uint16 ids, two bytes each",
                        file.size()));
  }
  return {TokenLayout::nanogpt, {std::move(file), 0, TokenType::uint16}};
}

}  // namespace lockstep::data
