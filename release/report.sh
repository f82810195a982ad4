#!/usr/bin/env bash
# docs/report.md as a PDF, for a release: release/report.sh [FILE], dist/qkv-report.pdf by itself.
#
# Needs requirements/docs.txt, and Pango, which WeasyPrint draws text with (Debian: libpango-1.0-0
# and libpangoft2-1.0-0). The same commit makes the same bytes; where there is no git, the same file.
set -euo pipefail
cd "$(dirname "$0")/.."

file=${1:-dist/qkv-report.pdf}
mkdir -p "$(dirname "$file")"
SOURCE_DATE_EPOCH=$(git -c safe.directory="$PWD" log -1 --format=%ct 2>/dev/null || stat -c %Y docs/report.md)
export SOURCE_DATE_EPOCH
# A link to another page leads nowhere in a PDF, so its words stay alone.
{
  echo '<meta charset="utf-8"><title>qkv: a report</title>'
  sed -E 's/\[([^]]+)\]\([a-z-]+\.md(#[a-z-]*)?\)/\1/g' docs/report.md | python -m markdown -x tables -x toc
} | python -m weasyprint --quiet --stylesheet release/report.css - "$file"
echo "$file"
