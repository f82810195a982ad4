#include "call/operator.h"

#include <c10/util/StringUtil.h>

#include "call/values.h"

namespace qkv {
namespace {

struct OptionDescription {
  const char *name, *type, *default_value;
};

constexpr OptionDescription kOptions[] = {
#define QKV_DESCRIPTION(name, type) {#name, Value<type>::kType, Value<type>::kDefault},
    QKV_OPTIONS(QKV_DESCRIPTION)
#undef QKV_DESCRIPTION
};

// The pieces of `text` between commas.
std::vector<std::string> pieces(const std::string& text) {
  std::vector<std::string> all;
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = std::min(text.find(", ", begin), text.size());
    all.push_back(text.substr(begin, end - begin));
    begin = end + 2;
  }
  return all;
}

// What comes before and after `at`; all of it before, if it is not there.
std::pair<std::string, std::string> split(const std::string& text, std::string_view at) {
  const size_t begin = text.find(at);
  if (begin == std::string::npos) return {text, ""};
  return {text.substr(0, begin), text.substr(begin + at.size())};
}

bool remove_suffix(std::string& text, char suffix) {
  const bool has_suffix = !text.empty() && text.back() == suffix;
  if (has_suffix) text.pop_back();
  return has_suffix;
}

Argument tensor_named(const std::string& name) {
  const Argument argument = argument_named("", name, "");
  TORCH_INTERNAL_ASSERT(argument != arg::count, "arguments.h has no tensor ", name);
  return argument;
}

// "name=" and "name? as argument", taken apart.
struct ParsedParameter {
  Parameter parameter;
  std::string schema;  // "float name=0.0"
  bool is_written;
};

ParsedParameter parse_parameter(const std::string& text) {
  auto [written, as] = split(text, " as ");
  const bool has_default = remove_suffix(written, '='), may_be_none = remove_suffix(written, '?');
  const auto [name, alias] = split(written, "(");
  const std::string& argument = as.empty() ? name : as;
  for (int i = 0; i < opt::count; ++i) {
    if (argument != kOptions[i].name) continue;
    return {{name, int8_t(i), /*is_tensor=*/false, /*is_required=*/false, has_default},
            c10::str(kOptions[i].type, " ", name,
                     has_default ? c10::str("=", kOptions[i].default_value) : ""),
            /*is_written=*/false};
  }
  return {
      {name, tensor_named(argument), /*is_tensor=*/true, /*is_required=*/!may_be_none, has_default},
      c10::str("Tensor", alias.empty() ? "" : "(" + alias, may_be_none ? "? " : " ", name,
               has_default ? "=None" : ""),
      !alias.empty()};
}

// "Tensor" of one result, "(Tensor output, Tensor logsumexp)" of several.
std::string schema_of_results(const std::vector<std::string>& names) {
  if (names.size() == 1) return "Tensor";
  return "(Tensor " + c10::Join(", Tensor ", names) + ")";
}

// The signature of a backward operator without what it returns.
std::string full_signature(const Operator& forward, const std::string& signature) {
  const auto [name, inner] = split(signature.substr(0, signature.size() - 1), "(");
  const auto [gradients, saved] = split(inner, "; ");
  std::vector<std::string> tensors, options;
  for (const Parameter& p : forward.parameters) {
    auto& group = p.is_tensor && !p.has_default ? tensors : options;
    const std::string own(p.is_tensor ? kArguments[p.which].name : kOptions[p.which].name);
    group.push_back(p.name + (p.is_tensor && !p.is_required ? "?" : "") +
                    (p.has_default ? "=" : "") + (own == p.name ? "" : " as " + own));
  }
  return name + "(" + gradients + ", " + c10::Join(", ", tensors) +
         (saved.empty() ? "" : ", " + saved) + ", *, " + c10::Join(", ", options) + ") -> ";
}

}  // namespace

Operator::Operator(const char* title, const std::string& signature, const OperatorKernels& kernels)
    : title(title), kernels(kernels) {
  parse(signature);
}

void Operator::parse(const std::string& signature) {
  const auto [head, tail] = split(signature, ") -> ");
  const auto [own_name, parameters_text] = split(head, "(");
  name = own_name;
  std::vector<std::string> schemas, result_names;
  for (const std::string& text : pieces(parameters_text)) {
    if (text == "*") {
      schemas.push_back(text);
      continue;
    }
    ParsedParameter parsed = parse_parameter(text);
    (parsed.parameter.is_tensor ? tensors_ : options_) |= uint64_t(1) << parsed.parameter.which;
    writes |= parsed.is_written;
    if (parsed.parameter.is_tensor && may_have_gradient(parsed.parameter.which))
      differentiable.push_back(Argument(parsed.parameter.which));
    parameters.push_back(std::move(parsed.parameter));
    schemas.push_back(std::move(parsed.schema));
  }
  for (const std::string& text : pieces(tail)) {
    const auto [result, argument] = split(text, " as ");
    results.push_back(tensor_named(argument.empty() ? result : argument));
    result_names.push_back(result);
  }
  schema = name + "(" + c10::Join(", ", schemas) + ") -> " + schema_of_results(result_names);
}

Operator::Operator(Operator& forward, const std::string& signature, const OperatorKernels& kernels)
    : title(forward.title), kernels(kernels) {
  parse(full_signature(forward, signature));
  differentiated = &forward;
  is_backward = true;
  order = forward.order + 1;
  incoming = pieces(split(split(signature, "(").second, "; ").first).size();
  results = forward.differentiable;
  std::vector<std::string> names;
  for (const Argument argument : results)
    names.push_back(c10::str("grad_", forward.name_of(argument)));
  const auto [head, none] = split(schema, ") -> ");
  schema = c10::str(head, ", bool[", names.size(), "] output_mask) -> ", schema_of_results(names));
  forward.backward = this;
}

const char* Operator::name_of(int which, bool is_tensor) const {
  for (const Parameter& p : parameters)
    if (p.is_tensor == is_tensor && p.which == which) return p.name.c_str();
  return is_tensor ? kArguments[which].name.data() : kOptions[which].name;
}
const char* Operator::name_of(Argument argument) const { return name_of(argument, true); }
const char* Operator::name_of(Option option) const { return name_of(option, false); }

}  // namespace qkv
