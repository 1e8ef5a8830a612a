"""`gyrostat token`: access tokens of a cluster that other machines can reach."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gyrostat.cli.cluster_options import AsJson, console, print_json
from gyrostat.core.errors import UsageError

_HELP = "\n\n".join(
    [
        "Manage the access tokens of a cluster that other machines can reach: `gyrostat up --listen 0.0.0.0:7460 --tokens "
        "FILE`.",
        "  gyrostat token add alice --root /srv/alice     (prints the token, once)",
        "  gyrostat token add ops --operator",
        "  gyrostat token list",
        "  gyrostat token revoke alice                    (takes effect immediately)",
        "A tenant can access its own jobs only, and runs scripts below its root. The file contains only hashes of tokens.",
    ]
)
app = typer.Typer(help=_HELP, no_args_is_help=True, rich_markup_mode="rich")
File = Annotated[Path, typer.Option("--file", metavar="FILE", help="Token file of the cluster.")]
_FILE = Path("tokens.json")


def register(parent: typer.Typer) -> None:
    parent.add_typer(app, name="token")


@app.command("add", short_help="Create a token for a tenant or an operator.")
def add(
    tenant: Annotated[str, typer.Argument(metavar="TENANT", show_default=False, help="Name of the tenant.")],
    operator: Annotated[
        bool, typer.Option("--operator", help="The token of an operator, who may do everything.")
    ] = False,
    root: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            show_default=False,
            help="Root of its scripts and working directories; required for tenants.",
        ),
    ] = None,
    modules: Annotated[
        bool,
        typer.Option(
            "--modules", help="It may also run modules (submit -m), which need not be below the root."
        ),
    ] = False,
    vc: Annotated[
        list[str] | None,
        typer.Option(
            "--vc",
            metavar="VC",
            show_default="the tenant's name",
            help="Virtual cluster to which it may submit. May be repeated.",
        ),
    ] = None,
    file: File = _FILE,
    as_json: AsJson = False,
) -> None:
    """Create a token. It is printed only now; the file contains its hash."""
    from gyrostat.cluster.api.tokens import Principal, new_token, read_tokens, write_tokens
    from gyrostat.cluster.job_spec import NAMES

    if not NAMES.fullmatch(tenant):
        raise UsageError(
            f"a tenant's name is made of up to 64 letters, digits, dots, dashes and underscores; got {tenant!r}"
        )
    if operator and (root is not None or vc or modules):
        raise UsageError("an operator may do everything: omit --root, --modules and --vc, or --operator")
    if not operator and root is None:
        raise UsageError(f"give the root of {tenant}'s scripts: --root DIR, such as --root /srv/{tenant}")
    if root is not None and not root.is_dir():
        raise UsageError(f"there is no directory {root} for {tenant}'s scripts")
    principal = Principal(
        tenant=tenant,
        operator=operator,
        root=None if root is None else str(root.resolve()),
        modules=modules,
        vcs=None if operator else tuple(vc or (tenant,)),
    )
    secret, token = new_token(principal)
    write_tokens(file, (*(read_tokens(file) if file.exists() else ()), token))
    if as_json:
        print_json({"token": secret, "id": token.id, "principal": principal})
    else:
        print(secret)


@app.command("list", short_help="List tokens and their tenants.")
def list_(file: File = _FILE, as_json: AsJson = False) -> None:
    """List the ids and tenants of tokens. The tokens themselves are not stored."""
    from rich.table import Table

    from gyrostat.cluster.api.tokens import read_tokens

    tokens = read_tokens(file)
    if as_json:
        print_json([{"id": token.id, "principal": token.principal} for token in tokens])
        return
    rows = Table("id", "tenant", "may", box=None)
    for token in tokens:
        who = token.principal
        may = "do everything" if who.operator else f"submit to {', '.join(who.vcs or ())}, below {who.root}"
        rows.add_row(token.id, who.tenant, may)
    console().print(rows)


@app.command("revoke", short_help="Revoke tokens.")
def revoke(
    which: Annotated[
        str,
        typer.Argument(
            metavar="TENANT|ID", show_default=False, help="All tokens of a tenant, or one token by its id."
        ),
    ],
    file: File = _FILE,
    as_json: AsJson = False,
) -> None:
    """Revoke all tokens of a tenant, or one token. Takes effect in a running cluster immediately."""
    from gyrostat.cluster.api.tokens import read_tokens, write_tokens

    tokens = read_tokens(file)
    kept = tuple(token for token in tokens if which not in (token.id, token.principal.tenant))
    if len(kept) == len(tokens):
        known = ", ".join(sorted({token.principal.tenant for token in tokens})) or "none"
        raise UsageError(f"there is no token of {which!r} in {file}; it has tokens of: {known}")
    write_tokens(file, kept)
    if as_json:
        print_json({"revoked": len(tokens) - len(kept)})
    else:
        print(f"{len(tokens) - len(kept)} revoked, {len(kept)} left")
