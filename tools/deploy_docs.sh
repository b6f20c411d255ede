#!/usr/bin/env bash
# Builds the site and commits it to gh-pages at origin: main's as "dev", and a tag's, such as v0.3.0's, as "0.3" and
# "latest". GITHUB_REF_TYPE and GITHUB_REF_NAME say which it is; GitHub sets them in a workflow.
set -euo pipefail
git config user.name 'github-actions[bot]'
git config user.email '41898282+github-actions[bot]@users.noreply.github.com'
if [[ $GITHUB_REF_TYPE == tag ]]; then
    version=${GITHUB_REF_NAME#v}
    names=("${version%.*}" latest)
elif mike list latest >/dev/null 2>&1; then
    names=(dev)
else
    names=(dev latest)  # until the first release, since README's links lead to latest
fi
# tools/docs_links.py lets links to files of the repository lead to this commit's files
DOCS_REVISION=$GITHUB_REF_NAME mike deploy --push --update-aliases "${names[@]}"
mike set-default --push latest
