// SPDX-License-Identifier: Apache-2.0
#include "lockstep/data/corpus.h"

#include <algorithm>
#include <cstring>
#include <string_view>
#include <utility>
#include <vector>

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/core/input_file.h"
#include "lockstep/data/json_lines.h"
#include "lockstep/data/text_files.h"
#include "lockstep/data/tokens/token_file.h"
#include "lockstep/data/tokens/token_source.h"
#include "lockstep/io/crc32c.h"

namespace lockstep::data {
namespace {

// Files are read where they lie, but small ones are quicker from memory. More descriptors than this
// are not kept: a process has few of them, and others need some.
constexpr uint64_t kCopyBelow = uint64_t{64} << 10;
constexpr size_t kMostOpen = 256;

// Of many tokens an identity looks at so many runs, and at the last.
constexpr int64_t kRuns = 256, kRun = 4096;

// Text, which a tokenizer encodes as a whole.
constexpr uint64_t kMostText = uint64_t{1} << 40;

// The tokens of one file, from position `begin` of the stream on.
struct CorpusFile {
  int64_t begin = 0;
  TokenSource tokens;
  std::string path;
};

std::vector<std::byte> narrowed(std::span<const int32_t> tokens, TokenType type) {
  const auto width = static_cast<size_t>(width_of(type));
  std::vector<std::byte> bytes(width * tokens.size());
  std::byte* at = bytes.data();
  for (const int32_t token : tokens) {
    std::memcpy(at, &token, width);  // little endian: the low bytes come first
    at += width;
  }
  return bytes;
}

enum class FileKind { text, token_ids, json_lines };

FileKind kind_of(const std::string& path) {
  if (is_token_file(path)) return FileKind::token_ids;
  return is_json_lines_file(path) ? FileKind::json_lines : FileKind::text;
}

const char* name_of(FileKind kind) {
  switch (kind) {
    case FileKind::token_ids:
      return "token ids";
    case FileKind::json_lines:
      return "JSON lines";
    default:
      return "text";
  }
}

const char* ending_of(FileKind kind) {
  if (kind == FileKind::text) return "";
  return kind == FileKind::token_ids ? " (.bin)" : " (.jsonl)";
}

FileKind kind_of_all(const DataFiles& files, const std::string& path) {
  const std::string& first = files.paths.front();
  const FileKind kind = kind_of(first);
  const auto other = std::ranges::find_if(
      files.paths, [&](const std::string& name) { return kind_of(name) != kind; });
  if (other == files.paths.end()) return kind;
  throw ConfigError(
      format("data path {}: {} is {}{}, but {} is {}{}; name only one kind, for example with a "
             "pattern",
             path, first, name_of(kind), ending_of(kind), *other, name_of(kind_of(*other)),
             ending_of(kind_of(*other))));
}

}  // namespace

struct Corpus::Data {
  std::vector<CorpusFile> files;
  int64_t size = 0, bytes = 0;
  FileKind kind = FileKind::text;
  int64_t unreadable = 0, binary = 0;
  int64_t modified = 0;  // when the file that was changed last was changed
  size_t open = 0;       // files
  JsonLines records;
  std::vector<Example> examples;
  std::vector<int64_t> record_ends;  // of records with text, but for the last

  void add(TokenSource tokens, const std::string& path) {
    if (tokens.in_file() && ++open > kMostOpen) tokens.close();
    const int64_t begin = size;
    size += tokens.size();
    files.push_back({begin, std::move(tokens), path});
  }

  void note(const InputFile& file, int64_t size_of_tokens) {
    bytes += size_of_tokens;
    modified = std::max(modified, file.modified());
  }

  void add_bytes(const std::string& path) {
    InputFile file(path);
    note(file, static_cast<int64_t>(file.size()));
    if (file.size() >= kCopyBelow) return add({std::move(file), 0, TokenType::uint8}, path);
    std::vector<std::byte> copy(file.size());
    file.read(0, copy);
    add({std::move(copy), TokenType::uint8}, path);
  }

  void add_encoded(const std::string& path, const Tokenizer& tokenizer, bool last) {
    const InputFile file(path);
    note(file, static_cast<int64_t>(file.size()));
    std::vector<int32_t> tokens = tokenizer.encode(read_text(path, kMostText));
    if (!last && tokenizer.end_of_text()) tokens.push_back(*tokenizer.end_of_text());
    add_ids(tokens, tokenizer, path);
  }

  // The end of text stands between documents, and after every completion.
  void add_records(const std::string& path, const Tokenizer& tokenizer) {
    const InputFile file(path);
    note(file, static_cast<int64_t>(file.size()));
    std::vector<int32_t> tokens;
    const auto append = [&](const std::vector<int32_t>& more) {
      tokens.insert(tokens.end(), more.begin(), more.end());
    };
    const auto end_text = [&] {
      if (tokenizer.end_of_text()) tokens.push_back(*tokenizer.end_of_text());
    };
    const auto position = [&] { return size + static_cast<int64_t>(tokens.size()); };
    records.read(path, [&](const Record& record) {
      if (!records.has_examples()) {
        if (record.text.empty()) return;
        if (position() > 0) {
          end_text();
          record_ends.push_back(position());
        }
        return append(tokenizer.encode(record.text));
      }
      Example example{.begin = position()};
      append(tokenizer.encode(record.text));
      example.answer = position();
      append(tokenizer.encode(record.completion));
      end_text();
      example.end = position();
      if (example.answer == example.begin) {
        throw ConfigError(
            format("{}: \"prompt\" is empty, so nothing comes before the completion's first token; "
                   "use records with \"text\", or give a prompt",
                   record.where));
      }
      if (example.end == example.answer) {
        throw ConfigError(
            format("{}: \"completion\" is empty, and the tokenizer {} has no end-of-text token: "
                   "the record has no token to learn",
                   record.where, tokenizer.name()));
      }
      examples.push_back(example);
    });
    add_ids(tokens, tokenizer, path);
  }

  void add_ids(std::span<const int32_t> tokens, const Tokenizer& tokenizer,
               const std::string& path) {
    const auto type = tokenizer.vocab_size() <= 65536 ? TokenType::uint16 : TokenType::uint32;
    add({narrowed(tokens, type), type}, path);
  }

  void add_tokens(const std::string& path) {
    TokenFile file = TokenFile::open(path);
    note(InputFile(path), file.size() * file.width());
    add(file.take(), path);
  }

  // The file that holds a position in [0, size).
  std::vector<CorpusFile>::const_iterator file_at(int64_t position) const {
    const auto after =
        std::upper_bound(files.begin(), files.end(), position,
                         [](int64_t value, const CorpusFile& file) { return value < file.begin; });
    return after - 1;
  }
};

Corpus Corpus::open(const std::string& path, const Tokenizer& tokenizer) {
  const DataFiles files = find_data_files(path);
  auto data = std::make_shared<Data>();
  data->unreadable = files.unreadable;
  data->binary = files.binary;
  const FileKind kind = data->kind = kind_of_all(files, path);
  for (const std::string& name : files.paths) {
    if (kind == FileKind::token_ids) {
      data->add_tokens(name);
    } else if (kind == FileKind::json_lines) {
      data->add_records(name, tokenizer);
    } else if (tokenizer.name() == "bytes") {
      data->add_bytes(name);
    } else {
      data->add_encoded(name, tokenizer, &name == &files.paths.back());
    }
  }
  if (data->size == 0) throw ConfigError(format("data path {}: has no tokens", path));
  const int64_t size = data->size;
  Examples examples;
  if (data->records.has_examples())
    examples = std::make_shared<std::vector<Example>>(std::exchange(data->examples, {}));
  return {std::move(data), 0, size, std::move(examples)};
}

void check_files(const std::string& path) {
  const DataFiles files = find_data_files(path);
  if (kind_of_all(files, path) != FileKind::json_lines) return;
  JsonLines records;
  for (const std::string& name : files.paths) records.read(name, [](const Record&) {});
}

void Corpus::read(int64_t begin, std::span<int64_t> out) const {
  const auto count = static_cast<int64_t>(out.size());
  if (begin < 0 || count > size() || begin > size() - count) {
    throw ConfigError(
        format("tokens [{}, {} + {}) of data that has [0, {})", begin, begin, count, size()));
  }
  if (count == 0) return;
  int64_t position = begin_ + begin;
  for (auto file = data_->file_at(position); !out.empty(); ++file) {
    const int64_t offset = position - file->begin;
    const auto here =
        std::min<size_t>(out.size(), static_cast<size_t>(file->tokens.size() - offset));
    file->tokens.read(offset, out.first(here));
    out = out.subspan(here);
    position += static_cast<int64_t>(here);
  }
}

int64_t Corpus::max_token(int64_t limit_tokens) const {
  const int64_t end = begin_ + std::clamp<int64_t>(limit_tokens, 0, size());
  if (end == begin_) return -1;
  int64_t largest = -1;
  for (auto file = data_->file_at(begin_); file != data_->files.end() && file->begin < end;
       ++file) {
    const int64_t first = std::max<int64_t>(begin_ - file->begin, 0);
    const int64_t last = std::min(end - file->begin, file->tokens.size());
    largest = std::max(largest, file->tokens.max(first, last));
  }
  return largest;
}

DataIdentity Corpus::identity() const {
  std::vector<int64_t> tokens(static_cast<size_t>(kRun));
  io::Crc32c crc;
  const auto add = [&](int64_t begin, int64_t count) {
    const auto run = std::span(tokens).first(static_cast<size_t>(count));
    read(begin, run);
    crc.update(std::as_bytes(run));
  };
  DataIdentity identity{.tokens = size(), .modified = data_->modified};
  if (!identity.is_sampled()) {
    for (int64_t begin = 0; begin < size(); begin += kRun)
      add(begin, std::min(kRun, size() - begin));
  } else {
    for (int64_t run = 0; run < kRuns; ++run) add((size() - kRun) / (kRuns - 1) * run, kRun);
    add(size() - kRun, kRun);
  }
  if (has_documents()) {
    io::Crc32c documents;
    documents.update(std::as_bytes(examples()));
    identity.documents = documents.value();
  } else {
    crc.update(std::as_bytes(examples()));
  }
  identity.crc = crc.value();
  return identity;
}

Corpus Corpus::slice(int64_t begin, int64_t end) const {
  if (begin < 0 || end < begin || end > size()) {
    throw ConfigError(format("slice [{}, {}) of data that has tokens [0, {})", begin, end, size()));
  }
  if (!has_examples()) return {data_, begin_ + begin, begin_ + end, nullptr};
  auto kept = std::make_shared<std::vector<Example>>();
  for (const Example& each : examples()) {
    if (each.begin >= begin && each.end <= end)
      kept->push_back({each.begin - begin, each.answer - begin, each.end - begin});
  }
  return {data_, begin_ + begin, begin_ + end, std::move(kept)};
}

bool Corpus::has_token_ids() const { return data_->kind == FileKind::token_ids; }

bool Corpus::has_documents() const { return has_examples() && !data_->records.has_examples(); }

namespace {

[[noreturn]] void refuse_without_ends(const std::string& path, std::optional<int64_t> end_of_text) {
  throw ConfigError(format(
      "documents of {}: it has no .idx file, and {}; name the tokenizer whose end-of-text token "
      "ends its documents (--data.tokenizer), or pack text with --layout megatron",
      path,
      end_of_text ? format("the end-of-text token {} is nowhere in it", *end_of_text)
                  : "the tokenizer has no end-of-text token"));
}

}  // namespace

// Where documents of the whole stream end, and its end.
std::vector<int64_t> Corpus::document_ends(std::optional<int64_t> end_of_text) const {
  std::vector<int64_t> ends = data_->record_ends;
  for (const CorpusFile& file : data_->files) {
    if (data_->kind == FileKind::json_lines) break;
    if (data_->kind == FileKind::token_ids) {
      const auto inside = document_ends_in(file.path);
      if (inside) {
        for (const int64_t end : *inside) ends.push_back(file.begin + end);
      } else {
        const auto found = end_of_text ? file.tokens.find(*end_of_text) : std::vector<int64_t>();
        if (found.empty()) refuse_without_ends(file.path, end_of_text);
        for (const int64_t at : found) ends.push_back(file.begin + at + 1);
      }
    }
    ends.push_back(file.begin + file.tokens.size());
  }
  ends.push_back(data_->size);
  return ends;
}

Corpus Corpus::documents(std::optional<int64_t> end_of_text) const {
  if (has_examples()) return *this;
  auto found = std::make_shared<std::vector<Example>>();
  int64_t begin = begin_;
  for (int64_t end : document_ends(end_of_text)) {
    end = std::min(end, end_);
    if (end - begin > 1) found->push_back({begin - begin_, begin - begin_ + 1, end - begin_});
    begin = std::max(begin, end);
  }
  return {data_, begin_, end_, std::move(found)};
}

std::span<const Example> Corpus::examples() const {
  return has_examples() ? std::span<const Example>(*examples_) : std::span<const Example>();
}

Corpus Corpus::answered(int64_t seq_len) const {
  if (!has_examples()) return *this;
  auto kept = *examples_;
  std::erase_if(kept,
                [&](const Example& each) { return each.inputs(seq_len) <= each.unanswered(); });
  return {data_, begin_, end_, std::make_shared<std::vector<Example>>(std::move(kept))};
}

std::string Corpus::describe() const {
  const size_t files = data_->files.size();
  const double bytes = static_cast<double>(data_->bytes);
  const std::string amount = bytes < 1e6   ? format("{:.1f} kB", bytes / 1e3)
                             : bytes < 1e9 ? format("{:.1f} MB", bytes / 1e6)
                                           : format("{:.1f} GB", bytes / 1e9);
  std::string text =
      format("{} {}, {} of {}", files, files == 1 ? "file" : "files", amount, name_of(data_->kind));
  text = size() == data_->size ? format("{}, {} tokens", text, size())
                               : format("{} of the {} tokens of {}", size(), data_->size, text);
  if (has_examples()) {
    const auto count = static_cast<int64_t>(examples_->size());
    text = format("{} in {}", counted(count, has_documents() ? "document" : "example"), text);
  }
  if (data_->binary > 0) text += format(", {} binary skipped", data_->binary);
  if (data_->unreadable > 0) text += format(", {} unreadable skipped", data_->unreadable);
  return text;
}

std::string Corpus::locate(int64_t position) const {
  if (position < 0 || position >= size()) {
    throw ConfigError(format("token {} of data that has [0, {})", position, size()));
  }
  const auto file = data_->file_at(begin_ + position);
  return format("{}, token {}", file->path, begin_ + position - file->begin);
}

std::string DataIdentity::describe() const {
  return format("{} tokens with checksum {:08x}{}", tokens, crc,
                documents == 0 ? "" : format(" in documents with checksum {:08x}", documents));
}

Split hold_out(const Corpus& corpus, double fraction) {
  if (!(fraction >= 0 && fraction < 1)) {
    throw ConfigError(
        format("the fraction of the data for validation is {}, must be in [0, 1)", fraction));
  }
  const auto examples = corpus.examples();
  const auto count = corpus.has_examples() ? static_cast<int64_t>(examples.size()) : corpus.size();
  const auto held = static_cast<int64_t>(static_cast<double>(count) * fraction);
  int64_t border = corpus.size() - held;
  if (corpus.has_examples())
    border = held == 0 ? corpus.size() : examples[static_cast<size_t>(count - held)].begin;
  return {corpus.slice(0, border), corpus.slice(border, corpus.size())};
}

}  // namespace lockstep::data
