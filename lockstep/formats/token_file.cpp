#include "lockstep/formats/token_file.h"

#include <sys/stat.h>

#include <cstring>
#include <utility>

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/formats/token_headers.h"

namespace lockstep::formats {
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

// ---- llm.c ----

bool has_llmc_magic(Bytes bytes) {
  if (bytes.size() < 4) return false;
  const auto magic = load<int32_t>(bytes, 0);
  return magic == kLlmc16.magic || magic == kLlmc32.magic || magic == kLlmcEvaluationMagic;
}

TokenSpan llmc_tokens(const std::string& path, Bytes bytes) {
  const auto magic = load<int32_t>(bytes, 0);
  if (magic == kLlmcEvaluationMagic) {
    refuse(path, "is an llm.c evaluation file (magic 20240522), not a stream of tokens");
  }
  if (bytes.size() < kLlmcHeaderBytes) {
    refuse(path,
           format("has {} bytes, an llm.c header has {}; the file is cut short or is not llm.c's",
                  bytes.size(), kLlmcHeaderBytes));
  }
  const LlmcKind kind = magic == kLlmc16.magic ? kLlmc16 : kLlmc32;
  if (const auto version = load<int32_t>(bytes, 4); version != kind.version) {
    refuse(path,
           format("llm.c magic {} with version {}, must be {}", magic, version, kind.version));
  }
  const int64_t count = load<int32_t>(bytes, 8);
  const int64_t there = static_cast<int64_t>(bytes.size() - kLlmcHeaderBytes);
  if (count < 0 || there != count * kind.width) {
    refuse(path, format("its llm.c header says {} tokens of {} bytes, but {} bytes follow it; the "
                        "file is cut short or still being written",
                        count, kind.width, there));
  }
  return {bytes.subspan(kLlmcHeaderBytes), kind.width == 2 ? TokenType::uint16 : TokenType::uint32};
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

// Sequences must follow one another from the start of .bin to its end, as Megatron writes them.
void check_sequences(const std::string& path, Bytes index, uint64_t sequences, uint64_t bin_bytes,
                     uint64_t width) {
  const uint64_t lengths = kMegatronHeaderBytes, pointers = lengths + 4 * sequences;
  uint64_t end = 0;
  for (uint64_t i = 0; i < sequences; ++i) {
    const auto length = load<int32_t>(index, lengths + 4 * i);
    const auto pointer = load<int64_t>(index, pointers + 8 * i);
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

void check_documents(const std::string& path, Bytes index, uint64_t sequences, uint64_t documents) {
  const uint64_t first = kMegatronHeaderBytes + 12 * sequences;
  int64_t before = 0;
  for (uint64_t i = 0; i < documents; ++i) {
    const auto border = load<int64_t>(index, first + 8 * i);
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

TokenType check_index(const std::string& path, Bytes index, uint64_t bin_bytes) {
  if (index.size() < kMegatronHeaderBytes ||
      std::memcmp(index.data(), kMegatronMagic, sizeof kMegatronMagic) != 0) {
    refuse(path, format("its {} bytes do not begin with Megatron's header of {} bytes (MMIDIDX)",
                        index.size(), kMegatronHeaderBytes));
  }
  if (const auto version = load<uint64_t>(index, 9); version != kMegatronVersion) {
    refuse(path, format("version {}, must be {}", version, kMegatronVersion));
  }
  const TokenType type = megatron_type(path, load<uint8_t>(index, 17));
  const auto sequences = load<uint64_t>(index, 18), documents = load<uint64_t>(index, 26);
  // Divided first: counts from a damaged header would overflow the products.
  if (sequences > index.size() / 12 || documents > index.size() / 8 ||
      index.size() != kMegatronHeaderBytes + 12 * sequences + 8 * documents) {
    refuse(path, format("has {} bytes, its header asks for {} + 12 x {} sequences + 8 x {} borders",
                        index.size(), kMegatronHeaderBytes, sequences, documents));
  }
  check_sequences(path, index, sequences, bin_bytes, static_cast<uint64_t>(width_of(type)));
  check_documents(path, index, sequences, documents);
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

TokenFile TokenFile::open(const std::string& path) {
  MappedFile file(path);
  const Bytes bytes = file.bytes();
  struct stat status {};
  if (const std::string index = index_path(path); stat(index.c_str(), &status) == 0) {
    const MappedFile mapped_index(index);
    const TokenType type = check_index(index, mapped_index.bytes(), bytes.size());
    return {std::move(file), TokenLayout::megatron, {bytes, type}};
  }
  if (has_llmc_magic(bytes)) {
    return {std::move(file), TokenLayout::llmc, llmc_tokens(path, bytes)};
  }
  if (bytes.size() % 2 != 0) {
    refuse(path, format("has {} bytes; without a header it must hold uint16 ids, two bytes each",
                        bytes.size()));
  }
  return {std::move(file), TokenLayout::nanogpt, {bytes, TokenType::uint16}};
}

}  // namespace lockstep::formats
