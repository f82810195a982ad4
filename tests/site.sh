#!/usr/bin/env bash
# Builds the site, as `make docs` does: a link or an anchor that leads nowhere is an error, and so is
# a docstring that cannot be read. Then looks for what nobody would be told.
set -euo pipefail
cd "$(dirname "$0")/.."

# Not --quiet, which keeps the warnings from --strict.
NO_MKDOCS_2_WARNING=1 mkdocs build --strict
site=build/site
failed=0

# holds WHAT COMMAND...: says WHAT if the command fails.
holds() {
  local what=$1
  shift
  "$@" || { echo "The site: $what"; failed=1; }
}
# none PATTERN: in no page.
none() { ! grep -rEo --include='*.html' -- "$1" "$site"; }

holds 'a page asks another server for something' none '<(script|img|iframe)[^>]* src="?(https?:)?//[^ >]*'
holds 'a page asks another server for a style' none '<link[^>]* rel="?(stylesheet|preconnect)"?[^>]*https?://[^ >]*'
holds 'an example of a docstring is a quotation' none '<blockquote>'
holds 'a "|" in a table is still escaped' none '<code>[^<]*\\\|[^<]*</code>'
holds 'a link is still called by a file' none '<a href="[^"]*\.html[^"]*">(docs/)?[a-z-]+\.md</a>'
holds 'attention has lost its options' grep -q '<b><code>alibi_slopes</code></b>' "$site/reference/qkv.html"
holds 'it cannot be searched from disk' test -s "$site/search/search_index.js" -a -s "$site/site/iframe-worker.js"
holds 'it does not open as it should in a browser' python tests/site_in_browser.py
if python -c 'import weasyprint' 2>/dev/null; then
  holds 'the report makes no PDF' release/report.sh build/report.pdf
else
  echo 'No PDF was made of the report: WeasyPrint, or the Pango that it needs, is not there'
fi
exit "$failed"
