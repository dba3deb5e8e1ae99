#include <string>
#include <string_view>
#include <vector>

#include "absl/strings/str_replace.h"
#include "ebb/runtime/base/message.h"
#include "ebb/runtime/config/keys.h"
#include "ebb/runtime/config/keys_as_text.h"

namespace ebb::config {
namespace {

constexpr std::string_view kHead = R"(# Configuration

<!-- Generated from the table in runtime/config/keys_*.cc; EBB_WRITE_DOCUMENTS=1 build/release/bin/config_keys_as_text_test writes it. -->

To configure a run, write a JSON file with DeepSpeed's keys. This command shows what Ebb does with each key of a file:

```sh
gpt --explain-config ds_config.json
```

`ebb-config.schema.json` is a JSON Schema for editors: name it in a file as `"$schema"`. It is in `runtime/config/`, and is installed beside
the headers.

- **Comments.** A file may have `//`, `/* */`, `#` and trailing commas. Keys that begin with `_` or `//`, or are named `comment` or
  `$schema`, are comments.
- **`"auto"`** becomes the trainer's value (`ReadOptions::trainer`; gpt: its options and their defaults; transformers' Trainer:
  TrainingArguments), else the default. Missing keys that training needs are filled in like `"auto"`: the size of the batch, the optimizer,
  the steps of a schedule.
- **Unknown keys** are errors in a section in which DeepSpeed refuses them ("strict" below), or if they look like a misspelling. The error
  names a key that looks like it. DeepSpeed ignores all others silently, and Ebb ignores them with a warning. `ebb.unknown_keys`, or
  `gpt --unknown-keys`, makes all of them errors, or warnings.
- **Values.** `5e8` is an integer. Words may be in upper or lower case. A key with `null` counts as missing. In `zero_optimization`, `fp16`
  and `bf16`, text and numbers are converted as DeepSpeed converts them (`"true"`, `1`, `"3"`).
- **Errors.** All errors of a file are reported together, each with its line and column.

The column "taken" says how Ebb uses a key: *literally*, as an *upper limit* of what the plan needs, or *approximated*. A key is *refused*
if its feature is not built, unless its value changes nothing. A key that is not taken literally is logged once at the start.
)";

// Text for a cell of a table.
std::string Cell(std::string_view text) {
  return absl::StrReplaceAll(absl::string_view(text.data(), text.size()),
                             {{"|", "\\|"}, {"*", "\\*"}, {"<", "&lt;"}});
}

std::string_view TakenAs(const Key& key) {
  switch (key.taken) {
    case Taken::kLiterally:
      return "literally";
    case Taken::kUpperLimit:
      return "upper limit";
    case Taken::kApproximated:
      return "approximated";
    case Taken::kRefused:
      return "refused";
  }
  return "";
}

std::string AllowedHere(const Key& key) {
  if (key.taken != Taken::kRefused) return Allowed(key);
  if (key.harmless == "disabled") return "an object whose \"enabled\" is not true";
  if (key.harmless == "off") return "an empty object, or one with everything switched off";
  return key.harmless.empty() ? "nothing" : Allowed(key);
}

std::string DefaultCell(const Key& key) {
  if (!key.default_value.empty()) return Join({"`", key.default_value, "`"});
  return key.required_for.empty() ? Cell(key.if_absent) : "required";
}

std::string TableRow(const Key& key, std::string_view prefix) {
  const std::string name = Join({"`", key.path.substr(prefix.size()), "`"});
  if (!key.same_as.empty()) {
    return Join({"| ", name, " | | | | ", key.is_deprecated ? "old" : "another", " name of `",
                 key.same_as, "` |\n"});
  }
  std::string meaning(key.meaning);
  if (!key.only_for.empty()) {
    meaning +=
        Join({" (",
              absl::StrReplaceAll(absl::string_view(key.only_for.data(), key.only_for.size()),
                                  {{"|", ", "}}),
              ")"});
  }
  return Join({"| ", name, " | ", Cell(AllowedHere(key)), " | ", DefaultCell(key), " | ",
               TakenAs(key), " | ", Cell(meaning), " |\n"});
}

// The keys of one block, without those of inner blocks.
std::string TableOf(const Key* block) {
  const std::string prefix = block == nullptr ? "" : Join({block->path, "."});
  std::string rows;
  for (const Key& key : Keys()) {
    if (key.is_block() || !key.path.starts_with(prefix)) continue;
    if (key.path.find('.', prefix.size()) == std::string_view::npos) rows += TableRow(key, prefix);
  }
  if (rows.empty()) return "";
  std::string head = "\n## Top level\n\n";
  if (block != nullptr) {
    const bool is_strict = block->kind == Kind::kBlock;
    head = Join({"\n## `", block->path, "`\n\n", Cell(block->meaning), is_strict ? " (strict)" : "",
                 ".\n\n"});
  }
  return Join(
      {head, "| key | allowed | default | taken | meaning |\n|---|---|---|---|---|\n", rows});
}

std::string NamesWithoutMeaning() {
  std::string rows;
  for (const WithoutMeaning& without : KeysWithoutMeaning()) {
    std::string names;
    ForEachWord(without.names, [&](std::string_view name) {
      names += Join({names.empty() ? "" : ", ", "`", without.block, name, "`"});
    });
    rows += Join({"| ", names, " | ", Cell(without.why), " |\n"});
  }
  return Join(
      {"\n## Keys without meaning here\n\nAccepted with one remark, whatever their value.\n\n"
       "| key | why |\n|---|---|\n",
       rows});
}

}  // namespace

std::string KeysAsMarkdown() {
  std::string text = Join({kHead, TableOf(nullptr)});
  for (const Key& key : Keys()) {
    if (key.is_block() && key.same_as.empty()) text += TableOf(&key);
  }
  return text + NamesWithoutMeaning();
}

}  // namespace ebb::config
