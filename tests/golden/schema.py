"""A database's schema as plain values, so that two ways to create it can be compared."""

import re

QUERIES = {
    "columns": """
        SELECT c.relname || '.' || a.attname, format_type(a.atttypid, a.atttypmod) || ' '
            || a.attnotnull || ' ' || coalesce(pg_get_expr(d.adbin, d.adrelid), '')
        FROM pg_attribute AS a JOIN pg_class AS c ON c.oid = a.attrelid
            LEFT JOIN pg_attrdef AS d ON d.adrelid = a.attrelid AND d.adnum = a.attnum
        WHERE c.relnamespace = 'public'::regnamespace AND c.relkind = 'r' AND a.attnum > 0
            AND NOT a.attisdropped""",
    "constraints": """
        SELECT conrelid::regclass || '.' || conname, pg_get_constraintdef(oid) FROM pg_constraint
        WHERE connamespace = 'public'::regnamespace AND contype <> 'n'""",
    "indexes": "SELECT indexname, indexdef FROM pg_indexes WHERE schemaname = 'public'",
    "triggers": """
        SELECT tgrelid::regclass || '.' || tgname, pg_get_triggerdef(oid) FROM pg_trigger
        WHERE NOT tgisinternal""",
    "functions": """
        SELECT p.oid::regprocedure::text, l.lanname || ' ' || p.prosecdef || ' ' || p.provolatile::text || ' '
            || pg_get_function_result(p.oid) || ' ' || coalesce(p.proconfig::text, '') || ' ' || p.prosrc
        FROM pg_proc AS p JOIN pg_language AS l ON l.oid = p.prolang
        WHERE p.pronamespace = 'public'::regnamespace""",
    "rights": """
        SELECT name || ' ' || coalesce(pg_get_userbyid(nullif(acl.grantee, 0)), 'PUBLIC'),
            string_agg(acl.privilege_type, ' ' ORDER BY acl.privilege_type)
        FROM (
            SELECT c.relname::text, coalesce(c.relacl, acldefault('r', c.relowner)), c.relowner
                FROM pg_class AS c WHERE c.relnamespace = 'public'::regnamespace AND c.relkind = 'r'
            UNION ALL SELECT a.attrelid::regclass || '.' || a.attname, a.attacl, c.relowner
                FROM pg_attribute AS a JOIN pg_class AS c ON c.oid = a.attrelid
                WHERE c.relnamespace = 'public'::regnamespace AND a.attacl IS NOT NULL
            UNION ALL SELECT p.oid::regprocedure::text, coalesce(p.proacl, acldefault('f', p.proowner)),
                p.proowner FROM pg_proc AS p WHERE p.pronamespace = 'public'::regnamespace
            UNION ALL SELECT 'schema public', nspacl, nspowner FROM pg_namespace WHERE nspname = 'public'
        ) AS objects (name, acls, owner), aclexplode(acls) AS acl
        WHERE acl.grantee <> owner GROUP BY name, acl.grantee""",
    "rows": "SELECT 'witness', to_jsonb(witness)::text FROM witness UNION ALL"
    " SELECT 'rules', to_jsonb(rules)::text FROM rules",
}


def snapshot(connection):
    """Everything by name; function bodies without comments and with single spaces."""

    def plain(text):
        return " ".join(re.sub(r"--[^\n]*", "", text).split())

    return {
        kind: {name: plain(text) for name, text in sorted(connection.execute(query).fetchall())}
        for kind, query in QUERIES.items()
    }
