# Sourced by .ci/run: virtual environments that are reused while what determines their content is the same.

# Print the folder of an environment with the project as $3 names it (arguments of pip) and the versions in file $1.
# $2 names the environment. It is created by $PYTHON if there is none. An environment takes about 6 GB, so an outdated
# one of this name is removed.
environment() {
    local key cache folder
    key=$(cat pyproject.toml "$1" .ci/environment.sh <("${PYTHON:-python3}" --version) | sha256sum | cut -c1-16)
    cache=${TRAINER_CI_CACHE:-${TMPDIR:-/tmp}/trainer-ci}
    folder=$cache/$2-$key
    if [ ! -e "$folder/complete" ]; then
        rm -rf "$cache/$2-"*
        "${PYTHON:-python3}" -m venv "$folder" >&2 || return
        # shellcheck disable=SC2086 # the words of the arguments
        "$folder/bin/pip" install --quiet --no-cache-dir -c "$1" $3 >&2 || return  # command substitutions ignore `set -e`
        touch "$folder/complete"
    fi
    # The dependencies are the same, but the project may not be.
    # shellcheck disable=SC2086
    "$folder/bin/pip" install --quiet --no-deps --force-reinstall $3 >&2 || return
    echo "$folder"
}
